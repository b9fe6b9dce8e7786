-- Changes the policies of a topic.
-- KEYS   meta
-- ARGV   offset ms, policies
-- RETURNS 1 changed | 0 there is no such topic
-- MEMORY keeps: a topic may be told to keep less
--#include clock
--#include full_memory
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
go_on_when_full(KEYS[1])
redis.call('HSET', KEYS[1], 'policies', ARGV[2], 'updatedAt', string.format('%.0f', now_ms(ARGV[1])))
return 1
