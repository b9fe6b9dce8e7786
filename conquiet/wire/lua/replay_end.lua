-- Ends a replay on a partition. A letter that has left the dead letters stays marked, by the time when that was known,
-- as long as another replay may have it at hand: one that has begun before, and is not given up. Such marks lie apart
-- from the others, so that nobody has to look through them.
-- KEYS   replayed, marks of letters that are gone
-- ARGV   offset ms, run, ms after which a run is given up, letters that were removed...
-- RETURNS 1
-- MEMORY frees: marks of the run
--#include clock
--#include full_memory
local replayed, gone = KEYS[1], KEYS[2]
local now, patience, oldest = now_ms(ARGV[1]), tonumber(ARGV[3]), nil
go_on_when_full(replayed)
redis.call('HDEL', replayed, 'run:' .. ARGV[2])
for at = 4, #ARGV do redis.call('HDEL', replayed, ARGV[at]) end
local flat = redis.call('HGETALL', replayed)
for at = 1, #flat, 2 do
  local begun = string.sub(flat[at], 1, 4) == 'run:' and tonumber(flat[at + 1])
  if begun and begun >= now - patience then oldest = math.min(oldest or begun, begun) end
end
if not oldest then
  redis.call('UNLINK', gone)
  return 1
end
for at = 4, #ARGV do redis.call('ZADD', gone, now, ARGV[at]) end
redis.call('PEXPIRE', gone, ARGV[3])
-- More than a call adds: what was kept for a replay that is over goes step by step.
local before = '(' .. string.format('%.0f', oldest)
for _, letter in ipairs(redis.call('ZRANGEBYSCORE', gone, '-inf', before, 'LIMIT', 0, 1000)) do
  redis.call('ZREM', gone, letter)
end
return 1
