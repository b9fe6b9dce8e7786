-- How many jobs are in each state.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   none
-- RETURNS {ready, in flight, succeeded, failed}
-- MEMORY reads
--#include jobs_keys
local waiting = redis.call('ZCARD', ready) + redis.call('ZCARD', delayed)
return {waiting, redis.call('ZCARD', leases), redis.call('ZCARD', succeeded), redis.call('ZCARD', failed)}
