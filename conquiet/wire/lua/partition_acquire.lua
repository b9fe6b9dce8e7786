-- Takes the lease of a partition for a group if nobody holds it, and makes sure that the group exists.
-- KEYS   lease, stream
-- ARGV   owner, ttl ms, offset ms, group, start ID of a new group, since (server ms when the owner joined),
--        known ('1': the group existed before), start ID if such a group is gone ('fail', 'resume' or an ID)
-- RETURNS {'OK', epoch, owner who did not release or '', suspect that it was running or '', last delivered ID}
--         {'HELD', owner, ms left} | {'DELETED'} the group was deleted after the owner joined | {'NOGROUP'}
--         {'SPARK'} it is a Spark query's, and nobody can consume with it
-- MEMORY keeps: what is there gets an owner who can finish it
--#include clock
--#include lease
--#include full_memory
--#include rows
local lease, stream = KEYS[1], KEYS[2]
local owner, ttl, offset, group, start, since, known, lost = unpack(ARGV)
local now = now_ms(offset)
local deleted, resume, running, spark = unpack(redis.call('HMGET', lease, 'deleted_ms', 'resume', 'running', 'spark'))
if deleted and tonumber(deleted) >= tonumber(since) then return {'DELETED'} end
if spark then return {'SPARK'} end
local other, left = held_by_other(lease, owner, now)
if other then return {'HELD', other, left} end

go_on_when_full(lease)
local exists = redis.call('EXISTS', stream) == 1
local there = exists and group_row(stream, group)
if not there then
  if known == '1' then
    start = '0-0'
    -- A lease outlives its group; where it is gone too, the server has forgotten everything.
    if exists and redis.call('HEXISTS', lease, 'epoch') == 1 then
      if lost == 'fail' then return {'NOGROUP'} end
      start = lost == 'resume' and (resume or '0-0') or lost
      redis.call('HINCRBY', lease, 'resets', 1)
    end
  end
  redis.call('XGROUP', 'CREATE', stream, group, start, 'MKSTREAM')
  there = group_row(stream, group)
end

-- What was left behind stays on record until it is taken over: this answer may be lost, and asked for again.
local mine = redis.call('HGET', lease, 'owner') == owner
local epoch, previous = acquire(lease, owner, ttl, now)
if not mine then redis.call('HDEL', lease, 'crashed', 'suspect') end
if previous ~= '' then redis.call('HSET', lease, 'crashed', previous, 'suspect', running or '') end
redis.call('HDEL', lease, 'deleted_ms', 'running')
local crashed, suspect = unpack(redis.call('HMGET', lease, 'crashed', 'suspect'))
return {'OK', epoch, crashed or '', suspect or '', there['last-delivered-id']}
