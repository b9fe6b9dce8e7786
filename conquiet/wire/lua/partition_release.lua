-- Gives a lease up, so that another owner can take it at once; the epoch stays. The consumer's name leaves the
-- group unless entries are pending under it.
-- KEYS   lease, stream
-- ARGV   owner, epoch, group
-- RETURNS 1 released | 0 lost before
-- MEMORY keeps: others can go on with it
--#include lease
--#include full_memory
--#include rows
local lease, stream = KEYS[1], KEYS[2]
local owner, epoch, group = unpack(ARGV)
if not holds(lease, owner, epoch) then return 0 end
go_on_when_full(lease)
release(lease)
redis.call('HDEL', lease, 'running')
if redis.call('EXISTS', stream) == 1 and group_row(stream, group) then
  if #redis.call('XPENDING', stream, group, '-', '+', 1, owner) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, owner)
  end
end
return 1
