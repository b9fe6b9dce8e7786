-- How many jobs are in each state, how many of those that are ready are not due, and for how long the oldest is.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms
-- RETURNS {ready, in flight, succeeded, failed, scheduled, ms since when the oldest is due or -1}
-- MEMORY reads
--#include clock
--#include jobs_keys
local now = now_ms(ARGV[1])
local later = redis.call('ZCOUNT', delayed, string.format('(%d', now), '+inf')
local waiting = redis.call('ZCARD', ready) + redis.call('ZCARD', delayed)
local oldest = math.huge

local function see(since)
  oldest = math.min(oldest, tonumber(since))
end

if waiting > later then
  local first = redis.call('ZRANGE', ready, 0, 0)[1]
  if first then see(string.sub(first, 11, 25)) end
  local due = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')
  if due[2] and tonumber(due[2]) <= now then see(due[2]) end
  -- The moments there may be too early, never too late: where the next one is not before what was found, that is it.
  local next_ones = redis.call('ZRANGE', waits, 0, 15, 'WITHSCORES')
  for at = 1, #next_ones, 2 do
    local priority, since = next_ones[at], tonumber(next_ones[at + 1])
    if since >= oldest then break end
    if string.sub(priority, 1, 1) ~= '+' then
      local place = redis.call('ZRANGEBYLEX', ready, '[' .. priority, '(' .. priority .. ':', 'LIMIT', 0, 1)[1]
      if place then see(string.sub(place, 11, 25)) end
    end
  end
end
return {
  waiting, redis.call('ZCARD', leases), redis.call('ZCARD', succeeded), redis.call('ZCARD', failed), later,
  oldest < math.huge and math.max(0, now - oldest) or -1,
}
