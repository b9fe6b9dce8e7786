-- Pauses a queue, so that nothing of it is claimed, or lets it go on and tells all who wait.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, 1 to pause, 0 to go on
-- RETURNS 1 if that has changed something, else 0
-- MEMORY keeps: who has no room left can stop and go on
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_wake
go_on_when_full(jobs)
local now, was_paused = now_ms(ARGV[1]), redis.call('EXISTS', paused)
if ARGV[2] == '1' then
  redis.call('SET', paused, '')
  return 1 - was_paused
end
redis.call('DEL', paused)
wake(now, 1000)
tell_all()
return was_paused
