-- Says that a consumer is alive, and prolongs the leases that it still holds; creates none.
-- KEYS   owners, leases, members, rooms
-- ARGV   owner, ttl ms, offset ms, how many more it would take over, positions, news, mutex (the beginning of its keys),
--        then name and epoch of each
-- RETURNS {names that it does not hold any more, consumers alive, streams that were given out and are unfinished,
--          how many more the others would take over}
-- MEMORY keeps: who owns a stream goes on
--#include clock
--#include balance_state
--#include full_memory
local owners, leases, members, rooms = unpack(KEYS)
local owner, ttl, offset, room, positions, news, mutex = unpack(ARGV)
local now = now_ms(offset)
go_on_when_full(members)
redis.call('ZADD', members, now, owner)
redis.call('HSET', rooms, owner, room)
-- Who ended without a word; a hundred at a time, should there ever be that many.
local before = string.format('%.0f', now - tonumber(ttl))
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', before, 'LIMIT', 0, 100)) do
  redis.call('ZREM', members, gone)
  redis.call('HDEL', rooms, gone)
end
-- So that they are there when the slot moves, also if nothing was committed or released. No stream has an
-- empty name.
redis.pcall('HSETNX', positions, '', '')
if redis.pcall('EXISTS', news) == 0 then redis.pcall('XADD', news, 'MAXLEN', 1, '*', 'begun', owner) end

local names, lost, kept = {}, {}, {}
for at = 8, #ARGV, 2 do names[#names + 1] = ARGV[at] end
local states = #names > 0 and redis.call('HMGET', owners, unpack(names)) or {}
local deadline = string.format('%.0f', now + tonumber(ttl))
for at, name in ipairs(names) do
  local epoch = ARGV[7 + 2 * at]
  if states[at] and string.match(states[at], '|(.*)$') == epoch .. '|' .. owner then
    kept[#kept + 1] = deadline
    kept[#kept + 1] = name
    if redis.pcall('PEXPIRE', mutex .. name, ttl) == 0 then show(mutex, name, owner, ttl) end
  else
    lost[#lost + 1] = name
  end
end
if #kept > 0 then redis.call('ZADD', leases, unpack(kept)) end
local others = 0
for _, left in ipairs(redis.call('HVALS', rooms)) do others = others + tonumber(left) end
return {lost, redis.call('ZCARD', members), redis.call('ZCARD', leases), others - tonumber(room)}
