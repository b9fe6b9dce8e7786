-- Begins a batch of a write that may be repeated, or finds it begun: the number of partitions is fixed by the first.
-- KEYS   write
-- ARGV   offset ms, number of the batch, partitions, for how long a batch can be repeated ms, ms after which all is
--        forgotten or '' for never, 'ids' or 'order': what rows are known by
-- RETURNS {'OK', partitions} | {'EXPIRED', begun ms} | {'OVERTAKEN', number of the batch that has begun since}
--         | {'OTHERWISE', what its rows are known by}
-- MEMORY adds: a batch, and then messages
--#include clock
local key = KEYS[1]
local offset, batch, partitions, keep, forget, by = unpack(ARGV)
local now = now_ms(offset)
local known = redis.call('HMGET', key, 'batch', 'partitions', 'begun_ms', 'by')
if known[1] == batch then
  if now - tonumber(known[3]) > tonumber(keep) then return {'EXPIRED', known[3]} end
  if known[4] ~= by then return {'OTHERWISE', known[4]} end
  return {'OK', known[2]}
end
if known[1] and tonumber(known[1]) > tonumber(batch) then return {'OVERTAKEN', known[1]} end
redis.call('HSET', key, 'batch', batch, 'partitions', partitions, 'begun_ms', string.format('%.0f', now), 'by', by)
if forget ~= '' then redis.call('PEXPIRE', key, forget) end
return {'OK', partitions}
