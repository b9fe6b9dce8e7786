-- Asks a group's members to look again; where there are none, there is nobody to ask.
-- KEYS   members, generation
-- ARGV   none
-- RETURNS 1 asked | 0 nobody there
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('INCR', KEYS[2])
return 1
