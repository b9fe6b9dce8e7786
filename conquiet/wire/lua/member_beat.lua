-- Tells a group that a member is alive, and the member who else is.
-- KEYS   members, info, generation
-- ARGV   member, its info, ttl ms, offset ms, 'alone' if it need not hear of the others
-- RETURNS {server ms, generation, member, info, member, info...}, or the first two alone
-- MEMORY keeps: who is a member goes on
--#include clock
--#include full_memory
local members, info, generation = unpack(KEYS)
local member, about, ttl, offset, alone = unpack(ARGV)
local now = now_ms(offset)
local changed = not redis.call('ZSCORE', members, member)
go_on_when_full(members)
redis.call('ZADD', members, now, member)
redis.call('HSET', info, member, about)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', members, '-inf', '(' .. string.format('%.0f', now - tonumber(ttl)))) do
  redis.call('ZREM', members, gone)
  redis.call('HDEL', info, gone)
  changed = true
end
if changed then redis.call('INCR', generation) end
local reply = {string.format('%.0f', now), redis.call('GET', generation) or '0'}
if alone == 'alone' then return reply end
local infos, flat = {}, redis.call('HGETALL', info)
for at = 1, #flat, 2 do infos[flat[at]] = flat[at + 1] end
for _, name in ipairs(redis.call('ZRANGE', members, 0, -1)) do
  reply[#reply + 1] = name
  reply[#reply + 1] = infos[name] or '{}'
end
return reply
