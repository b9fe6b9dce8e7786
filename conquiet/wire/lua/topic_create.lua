-- Makes a topic unless there is one.
-- KEYS   meta
-- ARGV   offset ms, partitions, partitioner, policies, created ms or '' for now, groups that are Spark queries'...
-- RETURNS {server ms, then the fields and values of the meta, as it was if there was one}
-- MEMORY adds: a topic
--#include clock
local meta = KEYS[1]
local offset, partitions, partitioner, policies, since = unpack(ARGV, 1, 5)
local now = string.format('%.0f', now_ms(offset))
-- Asked first: when memory is full, one that is there is found, and only one that is not is refused.
if redis.call('HEXISTS', meta, 'partitionCount') == 0 then
  redis.call('HSET', meta, 'partitionCount', partitions, 'createdAt', since ~= '' and since or now, 'updatedAt', now,
    'version', 1, 'partitioner', partitioner, 'policies', policies)
  for at = 6, #ARGV do redis.call('HSET', meta, 'group:' .. ARGV[at], 'spark') end
end
return {now, unpack(redis.call('HGETALL', meta))}
