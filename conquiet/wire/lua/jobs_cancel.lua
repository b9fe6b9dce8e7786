-- Fails a job that is not finished; if it is in flight its token rises, so that its worker has lost it.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, longest history, error of a cancelled job, ID
-- RETURNS {1 if done else 0, then as jobs_find, for this job as it is now}
-- MEMORY keeps: a job that is finished can be removed
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
--#include jobs_waits
--#include jobs_wake
--#include jobs_change
local offset, history, cancelled, id = unpack(ARGV)
local now, job = now_ms(offset), job_of(id)
if not job or job.state == 'S' or job.state == 'F' then return {0, unpack(known_of({id}))} end
go_on_when_full(jobs)
if job.state == 'I' then
  note_error(job, redis.call('HGET', errors, id), cancelled, cancelled, now, tonumber(history))
  job.token = string.format('%d', number_of(job.token) + 1)
  unleased[1] = id
else
  note_error(job, redis.call('HGET', errors, id), cancelled)
  leave_line(job)
end
fail(job, now)
keep(id, written(job))
write_down()
return {1, unpack(known_of({id}))}
