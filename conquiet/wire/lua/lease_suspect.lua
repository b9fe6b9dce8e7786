-- Notes which entry is about to be handled, so that a crash is counted against that one alone.
-- KEYS   lease
-- ARGV   owner, epoch, entry ID or '' when no suspect is left
-- RETURNS 1 noted | 0 lost
-- MEMORY keeps: who owns a partition goes on
--#include lease
--#include full_memory
if not holds(KEYS[1], ARGV[1], ARGV[2]) then return 0 end
go_on_when_full(KEYS[1])
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], 'running')
else
  redis.call('HSET', KEYS[1], 'running', ARGV[3])
end
return 1
