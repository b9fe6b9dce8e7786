-- Asks a group's members to look again; where there are none, there is nobody to ask.
-- KEYS   members, generation
-- ARGV   none
-- RETURNS 1 asked | 0 nobody there
-- MEMORY keeps: what was given up gets an owner at once
--#include full_memory
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
go_on_when_full(KEYS[1])
redis.call('INCR', KEYS[2])
return 1
