-- Removes a group from a partition. Its owner is fenced off and its members are refused from now on: of the lease only
-- the epoch and the time of the deletion stay, for a day. Dead letters that are not forwarded yet hold the rest up.
-- KEYS   lease, stream, retry, attempts, outbox, trim
-- ARGV   offset ms, group
-- RETURNS dead letters that are waiting; none means that the group is gone
--#include clock
--#include lease
--#include rows
local lease, stream, retry, attempts, outbox, trim = unpack(KEYS)
local offset, group = unpack(ARGV)
retire(lease, now_ms(offset))
local waiting = redis.call('XLEN', outbox)
if waiting > 0 then return waiting end
redis.call('DEL', retry, attempts, outbox)
redis.call('HDEL', trim, 'seen:' .. group, 'gone:' .. group)
if redis.call('EXISTS', stream) == 1 and group_row(stream, group) then
  redis.call('XGROUP', 'DESTROY', stream, group)
end
return 0
