-- Puts streams on the list of a topic that is about to be deleted: whoever repeats that finds them there.
-- KEYS   partitions
-- ARGV   streams...
-- RETURNS streams that were not listed
-- MEMORY keeps: what is listed can be deleted
--#include full_memory
go_on_when_full(KEYS[1])
return redis.call('SADD', KEYS[1], unpack(ARGV))
