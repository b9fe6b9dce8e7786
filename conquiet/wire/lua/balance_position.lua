-- Moves the place up to which a stream was read, if the caller still owns the stream.
-- KEYS   owners, positions
-- ARGV   owner, epoch, name, ID up to which all is done
-- RETURNS 1 moved | 0 another consumer has the stream, or none
-- MEMORY keeps: what was read need not be read again
--#include balance_state
--#include full_memory
if not has(KEYS[1], ARGV[3], ARGV[1], ARGV[2]) then return 0 end
go_on_when_full(KEYS[2])
redis.call('HSET', KEYS[2], ARGV[3], ARGV[4])
return 1
