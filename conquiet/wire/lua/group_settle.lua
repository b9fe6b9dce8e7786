-- Ends an announcement: the group is a Spark query's from now on, or stays what it was.
-- KEYS   meta
-- ARGV   offset ms, group, token of the announcement, 'spark' or '' to take it back
-- RETURNS 1 done | 0 the announcement does not count any more; nothing changed
-- MEMORY keeps: ends what the announcement has begun
--#include clock
--#include full_memory
local meta, field = KEYS[1], 'group:' .. ARGV[2]
local till, token = string.match(redis.call('HGET', meta, field) or '', '^claim:(%d+):(.*)$')
if token ~= ARGV[3] then return 0 end
go_on_when_full(meta)
if ARGV[4] == '' then return redis.call('HDEL', meta, field) end
-- Whoever has waited for it until then goes on as if it had never been.
if tonumber(till) <= now_ms(ARGV[1]) then return 0 end
redis.call('HSET', meta, field, 'spark')
return 1
