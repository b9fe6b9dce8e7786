-- Takes a member off its group and asks the others to look again.
-- KEYS   members, info, generation
-- ARGV   member
-- RETURNS 1 left | 0 was not there
-- MEMORY frees: a member
--#include full_memory
go_on_when_full(KEYS[1])
redis.call('HDEL', KEYS[2], ARGV[1])
local left = redis.call('ZREM', KEYS[1], ARGV[1])
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('INCR', KEYS[3])
else
  redis.call('DEL', KEYS[3])
end
return left
