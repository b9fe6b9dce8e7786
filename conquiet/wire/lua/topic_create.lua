-- Makes a topic unless there is one.
-- KEYS   meta
-- ARGV   offset ms, partitions, partitioner, policies, created ms or '' for now, groups that are Spark queries'...
-- RETURNS {1 created | 0 was there, then the fields and values of the meta}
--#include clock
local meta = KEYS[1]
local offset, partitions, partitioner, policies, since = unpack(ARGV, 1, 5)
local created = 0
if redis.call('HSETNX', meta, 'partitionCount', partitions) == 1 then
  local now = string.format('%.0f', now_ms(offset))
  redis.call('HSET', meta, 'createdAt', since ~= '' and since or now, 'updatedAt', now, 'version', 1,
    'partitioner', partitioner, 'policies', policies)
  for at = 6, #ARGV do redis.call('HSET', meta, 'group:' .. ARGV[at], 'spark') end
  created = 1
end
return {created, unpack(redis.call('HGETALL', meta))}
