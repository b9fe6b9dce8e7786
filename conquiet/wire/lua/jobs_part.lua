-- Forgets that a store waits for jobs, and tells another if there is something to claim or a moment to look at.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, name of the store
-- RETURNS how many others were told
-- MEMORY keeps: a job that is ready is run
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_wake
go_on_when_full(jobs)
local now = now_ms(ARGV[1])
if part(ARGV[2]) or redis.call('EXISTS', ready) == 1 then return wake(now, 1) end
return 0
