-- Makes a group of a partition a Spark query's and puts it where the query is, unless somebody consumes with it. The
-- lease, which nobody can take from now on, says so in the partition's own slot; an owner of before is fenced off.
-- KEYS   lease, stream, retry
-- ARGV   offset ms, group, ID after which it goes on, or '' to leave it where it is and begin a new one at the
--        beginning, entries appended up to there or '', 'take', or 'look' to change nothing, or 'extend' to take it
--        unless it was deleted from there since a server's time, that time in ms
-- RETURNS {'OK', ID where the group stood or '' if it is new} | {'BUSY', owner or '', consumers, pending, parked}
-- MEMORY keeps: ends what an announcement, or a growth, has begun
--#include clock
--#include full_memory
--#include lease
--#include rows
--#include position
local lease, stream, retry = unpack(KEYS)
local offset, group, id, entries, action, since = unpack(ARGV)
local now = now_ms(offset)
local there = redis.call('EXISTS', stream) == 1 and group_row(stream, group)
local owner, parked = held_by_other(lease, '', now), redis.call('ZCARD', retry)
local consumers, pending = there and there['consumers'] or 0, there and there['pending'] or 0
if owner or consumers + pending + parked > 0 then return {'BUSY', owner or '', consumers, pending, parked} end

local before = there and there['last-delivered-id'] or ''
local deleted = tonumber(redis.call('HGET', lease, 'deleted_ms') or 0)
local is_gone = action == 'extend' and not there and deleted >= tonumber(since)
if action == 'look' or is_gone then return {'OK', before} end
go_on_when_full(lease)
if not there then
  redis.call('XGROUP', 'CREATE', stream, group, '0-0', 'MKSTREAM')
  there = group_row(stream, group)
end
if id ~= '' then put_after(stream, there, id, entries) end
if redis.call('HEXISTS', lease, 'epoch') == 1 then
  redis.call('HDEL', lease, 'running', 'resume', 'crashed', 'suspect', 'forget')
  redis.call('HSET', lease, 'owner', '')
  next_epoch(lease, now)
end
redis.call('HSET', lease, 'spark', 1, 'until_ms', string.format('%.0f', now))
return {'OK', before}
