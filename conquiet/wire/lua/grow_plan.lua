-- Announces that a topic gets more partitions, in time for every producer to hear of it before it takes effect.
-- KEYS   meta
-- ARGV   offset ms, partitions, ms until it takes effect
-- RETURNS {'OK', ms left until it takes effect} | {'LESS', partitions} | {'BUSY', partitions planned} | {'UNKNOWN'}
-- MEMORY adds: partitions
--#include clock
local meta, now, wanted = KEYS[1], now_ms(ARGV[1]), tonumber(ARGV[2])
local known = redis.call('HMGET', meta, 'partitionCount', 'nextCount', 'effectiveAt')
if not known[1] then return {'UNKNOWN'} end
if wanted <= tonumber(known[1]) then return {'LESS', known[1]} end
if known[2] then
  if tonumber(known[2]) ~= wanted then return {'BUSY', known[2]} end
  return {'OK', tonumber(known[3]) - now}
end
local effective = now + tonumber(ARGV[3])
redis.call('HSET', meta, 'nextCount', ARGV[2], 'effectiveAt', string.format('%.0f', effective))
return {'OK', effective - now}
