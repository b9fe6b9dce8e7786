-- Takes all members off a group. Those who live notice by the generation, which is left behind for a while.
-- KEYS   members, info, generation
-- ARGV   ms for which the generation is kept
-- RETURNS members taken off
-- MEMORY frees: all members
--#include full_memory
local members, info, generation = unpack(KEYS)
local count = redis.call('ZCARD', members)
go_on_when_full(members)
redis.call('DEL', members, info)
if count > 0 or redis.call('EXISTS', generation) == 1 then
  redis.call('INCR', generation)
  redis.call('PEXPIRE', generation, ARGV[1])
end
return count
