-- Makes a planned growth the topic's partition count, once, and notes where the old partitions ended.
-- KEYS   meta
-- ARGV   offset ms, partitions before, partitions after, the step as JSON
-- RETURNS 1 done | 0 there is no such plan (any more)
-- MEMORY keeps: until a growth is completed, no group takes what could make room
--#include clock
--#include full_memory
local meta = KEYS[1]
local offset, before, after, step = unpack(ARGV)
local known = redis.call('HMGET', meta, 'partitionCount', 'nextCount', 'growth')
if known[1] ~= before or known[2] ~= after then return 0 end
go_on_when_full(meta)
local steps = string.match(known[3] or '', '^%s*%[%s*(.-)%s*%]%s*$') or ''
if steps ~= '' then step = steps .. ',' .. step end
redis.call('HSET', meta, 'partitionCount', after, 'growth', '[' .. step .. ']',
  'updatedAt', string.format('%.0f', now_ms(offset)))
redis.call('HINCRBY', meta, 'version', 1)
redis.call('HDEL', meta, 'nextCount', 'effectiveAt')
return 1
