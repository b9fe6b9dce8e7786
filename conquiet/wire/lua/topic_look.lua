-- A topic's meta together with the server's time, by which a planned growth takes effect.
-- KEYS   meta
-- ARGV   offset ms
-- RETURNS {server ms, then the fields and values of the meta, none if there is no such topic}
-- MEMORY reads
--#include clock
return {string.format('%.0f', now_ms(ARGV[1])), unpack(redis.call('HGETALL', KEYS[1]))}
