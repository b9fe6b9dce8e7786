-- Prolongs a lease that is still held; never creates one.
-- KEYS   lease
-- ARGV   owner, epoch, ttl ms, offset ms
-- RETURNS 1 renewed | 0 lost to another owner or released | -1 there is no such lease
-- MEMORY keeps: who owns a partition goes on
--#include clock
--#include lease
--#include full_memory
if not holds(KEYS[1], ARGV[1], ARGV[2]) then
  return redis.call('EXISTS', KEYS[1]) - 1
end
go_on_when_full(KEYS[1])
redis.call('HSET', KEYS[1], 'until_ms', now_ms(ARGV[4]) + tonumber(ARGV[3]))
return 1
