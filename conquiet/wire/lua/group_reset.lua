-- Moves a group on a partition to another place and forgets what it has not finished, a page a call. An owner is fenced
-- off and has to take the lease again.
-- KEYS   lease, stream, retry, attempts
-- ARGV   offset ms, group, ID after which it goes on, '$' for the end, or '' to go on with what was begun, size of a page
-- RETURNS 1 another page is needed | 0 done, by this call or by somebody who took the lease
-- MEMORY frees: all that the group has not finished
--#include clock
--#include full_memory
--#include lease
--#include rows
--#include forgetting
local lease, stream, retry, attempts = unpack(KEYS)
local offset, group, id, size = unpack(ARGV)
go_on_when_full(stream)
if id ~= '' then
  begin_forgetting(lease, stream, retry, attempts, group, id)
  redis.call('HSET', lease, 'owner', '', 'until_ms', 0, 'resume', group_row(stream, group)['last-delivered-id'])
  redis.call('HDEL', lease, 'running', 'crashed', 'suspect')
  -- In the same call that moves the group: members that know what it had finished ask again.
  redis.call('HINCRBY', lease, 'resets', 1)
  next_epoch(lease, now_ms(offset))
end
if redis.call('HEXISTS', lease, 'forget') == 0 then return 0 end
return forget_page(lease, stream, group, size) and 1 or 0
