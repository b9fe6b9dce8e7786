-- Removes a group from a partition, a page of what it has not finished a call. Its owner is fenced off and its members
-- are refused from now on: of the lease only the epoch and the time of the deletion stay, for a day. Dead letters that
-- are not forwarded yet hold the rest up. Whoever subscribes after a deletion that was not completed completes it.
-- KEYS   lease, stream, retry, attempts, outbox, trim
-- ARGV   offset ms, group, size of a page
-- RETURNS {dead letters that are waiting, 1 if another page is needed | 0}; none and 0 mean that the group is gone
-- MEMORY frees: all that the group has not finished
--#include clock
--#include full_memory
--#include lease
--#include rows
--#include forgetting
local lease, stream, retry, attempts, outbox, trim = unpack(KEYS)
local offset, group, size = unpack(ARGV)
local now = now_ms(offset)
go_on_when_full(lease)
retire(lease, now)
redis.call('HSET', lease, 'deleted_ms', string.format('%.0f', now))
local waiting = redis.call('XLEN', outbox)
if waiting > 0 then return {waiting, 0} end
if redis.call('EXISTS', stream) == 1 and group_row(stream, group) then
  if redis.call('HEXISTS', lease, 'forget') == 0 then
    begin_forgetting(lease, stream, retry, attempts, group, '0-0')
  end
  if forget_page(lease, stream, group, size) then return {0, 1} end
  redis.call('XGROUP', 'DESTROY', stream, group)
end
redis.call('HDEL', lease, 'forget')
redis.call('UNLINK', retry, attempts, outbox)
redis.call('HDEL', trim, 'seen:' .. group, 'gone:' .. group)
return {0, 0}
