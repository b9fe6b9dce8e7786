-- Announces that a group is to become a Spark query's: whoever subscribes meanwhile waits for the outcome. An
-- announcement whose author is not heard of any more counts for a while only.
-- KEYS   meta
-- ARGV   offset ms, group, token of the announcement, ms for which it counts
-- RETURNS 'OK' | 'SPARK' it is a Spark query's already | 'BUSY' another one has announced it | 'UNKNOWN' no such topic
-- MEMORY adds: an announcement, and then a group
--#include clock
local meta, field, now = KEYS[1], 'group:' .. ARGV[2], now_ms(ARGV[1])
if redis.call('HEXISTS', meta, 'partitionCount') == 0 then return 'UNKNOWN' end
local mark = redis.call('HGET', meta, field) or ''
if mark == 'spark' then return 'SPARK' end
local till, token = string.match(mark, '^claim:(%d+):(.*)$')
if till and token ~= ARGV[3] and tonumber(till) > now then return 'BUSY' end
redis.call('HSET', meta, field, 'claim:' .. string.format('%.0f', now + tonumber(ARGV[4])) .. ':' .. ARGV[3])
return 'OK'
