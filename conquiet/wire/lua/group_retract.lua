-- Takes back that a group of a partition is a Spark query's: it stands where it stood before, or is gone if it was new.
-- KEYS   lease, stream
-- ARGV   group, ID where it stood or '' if it was new
-- RETURNS 1 done | 0 it is no Spark query's
-- MEMORY frees: a group that was new is gone again
--#include full_memory
--#include rows
local lease, stream = unpack(KEYS)
local group, before = unpack(ARGV)
go_on_when_full(stream)
if redis.call('HDEL', lease, 'spark') == 0 then return 0 end
if redis.call('HEXISTS', lease, 'epoch') == 0 then redis.call('DEL', lease) end
if before == '' then redis.call('PEXPIRE', lease, 86400000) end -- as that of any group that is gone
local there = redis.call('EXISTS', stream) == 1 and group_row(stream, group)
-- Somebody who has begun to consume with it meanwhile keeps it.
if there and there['consumers'] + there['pending'] == 0 then
  if before == '' then
    redis.call('XGROUP', 'DESTROY', stream, group)
  else
    redis.call('XGROUP', 'SETID', stream, group, before)
  end
end
return 1
