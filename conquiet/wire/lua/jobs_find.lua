-- All that is known of jobs; of the first ones only, if that comes to much.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   IDs...
-- RETURNS {{first writing or nil...}, {record or nil...}, {errors or nil...}, {until when leased ms or nil...}}
-- MEMORY reads
--#include jobs_keys
--#include jobs_record
return known_of(ARGV)
