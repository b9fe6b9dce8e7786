-- Moves a group on a partition to another place and forgets what it has not finished, all at once. An owner is fenced
-- off and has to take the lease again.
-- KEYS   lease, stream, retry, attempts
-- ARGV   group, ID after which it goes on, or '$' for the end
-- RETURNS pending entries forgotten
--#include rows
local lease, stream, retry, attempts = unpack(KEYS)
local group, id = ARGV[1], ARGV[2]
local there = redis.call('EXISTS', stream) == 1 and group_row(stream, group)
local forgotten = 0
redis.call('DEL', retry, attempts)
while there do
  local page = redis.call('XPENDING', stream, group, '-', '+', 1000)
  if #page == 0 then break end
  local ids = {}
  for at, entry in ipairs(page) do ids[at] = entry[1] end
  forgotten = forgotten + redis.call('XACK', stream, group, unpack(ids))
end
if there then
  redis.call('XGROUP', 'SETID', stream, group, id)
else
  redis.call('XGROUP', 'CREATE', stream, group, id, 'MKSTREAM')
end
if redis.call('EXISTS', lease) == 1 then
  redis.call('HSET', lease, 'owner', '', 'until_ms', 0, 'resume', group_row(stream, group)['last-delivered-id'])
  redis.call('HDEL', lease, 'running')
  -- In the same call that moves the group: members that know what it had finished ask again.
  redis.call('HINCRBY', lease, 'resets', 1)
  redis.call('HINCRBY', lease, 'epoch', 1)
end
return forgotten
