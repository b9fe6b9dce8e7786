-- Gives streams back unfinished, so that others can take them at once, and tells them.
-- KEYS   owners, leases, members, rooms
-- ARGV   owner, leaving ('1': the consumer goes too), news, mutex (the beginning of its keys), then name and epoch of
--        each
-- RETURNS one number a stream: 1 released | 0 another consumer has it, or none
-- MEMORY keeps: others can go on with it
--#include balance_state
--#include full_memory
local owners, leases, members, rooms = unpack(KEYS)
local owner, leaving, news, mutex = unpack(ARGV)
local reply, any = {}, false
go_on_when_full(owners)
for at = 5, #ARGV, 2 do
  local name, epoch = ARGV[at], ARGV[at + 1]
  if has(owners, name, owner, epoch) then
    redis.call('HSET', owners, name, state_of(owners, name) .. '|' .. epoch .. '|')
    redis.call('ZADD', leases, 0, name)
    hide(mutex, name)
    reply[#reply + 1] = 1
    any = true
  else
    reply[#reply + 1] = 0
  end
end
if leaving == '1' then
  redis.call('ZREM', members, owner)
  redis.call('HDEL', rooms, owner)
end
if any then redis.pcall('XADD', news, 'MAXLEN', 1, '*', 'released', owner) end
return reply
