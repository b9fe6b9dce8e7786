-- Makes a failed job ready again, as if for the first time.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, ID
-- RETURNS {1 if done else 0, then as jobs_find, for this job as it is now}
-- MEMORY adds: a job to be run
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
--#include jobs_waits
--#include jobs_wake
--#include jobs_change
local now, id = now_ms(ARGV[1]), ARGV[2]
local job = job_of(id)
if not job or job.state ~= 'F' then return {0, unpack(known_of({id}))} end
stop_when_full(sequence)
redis.call('ZREM', failed, in_digits(tonumber(job.finished)) .. id)
job.state, job.attempts, job.ready = 'R', 0, now
job.finished, job.worker, job.claimed = '-', nil, '-'
line_up(job, now)
keep(id, written(job))
tell(now)
write_down()
return {1, unpack(known_of({id}))}
