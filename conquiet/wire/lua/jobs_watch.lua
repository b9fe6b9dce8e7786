-- Asks for word of jobs that end, for a while, and tells from where on to listen.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   for how long ms
-- RETURNS {ID of the last news, ID of the last word of an end}
-- MEMORY keeps: an end can be waited for
--#include full_memory
--#include jobs_keys
--#include jobs_wake
go_on_when_full(jobs)
redis.call('SET', watched, '', 'PX', ARGV[1])
return {last_of(news), last_of(ended)}
