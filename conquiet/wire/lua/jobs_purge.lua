-- Removes finished jobs, the oldest first: those beyond a number, and those that finished too long ago.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, 'S' or 'F' as in records, how long to keep them ms or '', how many to keep or ''
-- RETURNS how many were removed, at most 1000
-- MEMORY frees: jobs
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
local offset, state, age, count = unpack(ARGV)
local line, surplus = state == 'S' and succeeded or failed, 0
if count ~= '' then surplus = redis.call('ZCARD', line) - tonumber(count) end
if age ~= '' then
  local since = math.ceil(now_ms(offset) - tonumber(age))
  if since > 0 then surplus = math.max(surplus, redis.call('ZLEXCOUNT', line, '-', '(' .. in_digits(since))) end
end
surplus = math.min(surplus, 1000)
if surplus <= 0 then return 0 end
go_on_when_full(jobs)
local members, ids = redis.call('ZRANGE', line, 0, surplus - 1), {}
for at, member in ipairs(members) do ids[at] = string.sub(member, 16) end
in_pieces('ZREM', line, members)
for _, key in ipairs({jobs, records, errors}) do in_pieces('HDEL', key, ids) end
return #ids
