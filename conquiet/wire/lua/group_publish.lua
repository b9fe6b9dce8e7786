-- Puts a Spark query's group of a partition where the query is, and notes that it is being served. Never makes one.
-- KEYS   lease, stream
-- ARGV   offset ms, group, ID up to which all is done, entries appended up to there or ''
-- RETURNS 'OK' | 'LOST' there is no such group, or it is no Spark query's | 'BUSY' somebody consumes with it
-- MEMORY keeps: what the query has read can be removed
--#include clock
--#include full_memory
--#include rows
--#include position
local lease, stream = unpack(KEYS)
local offset, group, id, entries = unpack(ARGV)
if redis.call('HEXISTS', lease, 'spark') == 0 or redis.call('EXISTS', stream) == 0 then return 'LOST' end
local there = group_row(stream, group)
if not there then return 'LOST' end
if there['consumers'] + there['pending'] > 0 then return 'BUSY' end
go_on_when_full(lease)
put_after(stream, there, id, entries)
redis.call('HSET', lease, 'until_ms', string.format('%.0f', now_ms(offset)))
return 'OK'
