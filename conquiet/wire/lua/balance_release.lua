-- Gives streams back unfinished, so that others can take them at once, and tells them.
-- KEYS   owners, leases, members, rooms, news, mutex (the beginning of its keys)
-- ARGV   owner, leaving ('1': the consumer goes too), then name and epoch of each
-- RETURNS one number a stream: 1 released | 0 somebody else has it, or nobody
--#include balance_state
local owners, leases, members, rooms, news, mutex = unpack(KEYS)
local owner, leaving = ARGV[1], ARGV[2]
local reply, any = {}, false
for at = 3, #ARGV, 2 do
  local name, epoch = ARGV[at], ARGV[at + 1]
  if has(owners, name, owner, epoch) then
    redis.call('HSET', owners, name, state_of(owners, name) .. '|' .. epoch .. '|')
    redis.call('ZADD', leases, 0, name)
    redis.call('DEL', mutex .. name)
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
if any then redis.call('XADD', news, 'MAXLEN', 1, '*', 'released', owner) end
return reply
