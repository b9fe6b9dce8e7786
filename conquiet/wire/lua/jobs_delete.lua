-- Removes a finished job.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   ID
-- RETURNS {1 if done else 0, then as jobs_find, for this job as it was}
-- MEMORY frees: a job
--#include full_memory
--#include jobs_keys
--#include jobs_record
local id = ARGV[1]
local job, known = job_of(id), known_of({id})
if not job or job.state ~= 'S' and job.state ~= 'F' then return {0, unpack(known)} end
go_on_when_full(jobs)
redis.call('ZREM', job.state == 'S' and succeeded or failed, in_digits(tonumber(job.finished)) .. id)
for _, key in ipairs({jobs, records, errors}) do redis.call('HDEL', key, id) end
return {1, unpack(known)}
