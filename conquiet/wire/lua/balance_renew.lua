-- Says that a consumer is alive, and prolongs the leases that it still holds; creates none.
-- KEYS   owners, leases, members, rooms, mutex (the beginning of its keys)
-- ARGV   owner, ttl ms, offset ms, how many more it would take over, then name and epoch of each
-- RETURNS {names that it does not hold any more, consumers alive, streams that were given out and are unfinished,
--          how many more the others would take over}
--#include clock
--#include balance_state
local owners, leases, members, rooms, mutex = unpack(KEYS)
local owner, ttl, offset, room = unpack(ARGV)
local now = now_ms(offset)
redis.call('ZADD', members, now, owner)
redis.call('HSET', rooms, owner, room)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', string.format('%.0f', now - tonumber(ttl)))) do
  redis.call('ZREM', members, gone)
  redis.call('HDEL', rooms, gone)
end

local names, lost, kept = {}, {}, {}
for at = 5, #ARGV, 2 do names[#names + 1] = ARGV[at] end
local states = #names > 0 and redis.call('HMGET', owners, unpack(names)) or {}
local deadline = string.format('%.0f', now + tonumber(ttl))
for at, name in ipairs(names) do
  local epoch = ARGV[4 + 2 * at]
  if states[at] and string.match(states[at], '|(.*)$') == epoch .. '|' .. owner then
    kept[#kept + 1] = deadline
    kept[#kept + 1] = name
    if redis.call('PEXPIRE', mutex .. name, ttl) == 0 then redis.call('SET', mutex .. name, owner, 'PX', ttl) end
  else
    lost[#lost + 1] = name
  end
end
if #kept > 0 then redis.call('ZADD', leases, unpack(kept)) end
local others = 0
for _, left in ipairs(redis.call('HVALS', rooms)) do others = others + tonumber(left) end
return {lost, redis.call('ZCARD', members), redis.call('ZCARD', leases), others - tonumber(room)}
