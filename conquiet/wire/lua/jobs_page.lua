-- A page of the jobs in one state, shorter if they are large: in claim order if ready, by sequence if in flight, by time if finished.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   state as in records, size of the page, what the page before gave to go on with or ''
-- RETURNS {what to go on with or '', {IDs...}, then as jobs_find}
-- MEMORY reads
--#include jobs_keys
--#include jobs_record
local state, size, after = ARGV[1], tonumber(ARGV[2]), ARGV[3]

-- Up to size + 1 members of a line, and where in a member its ID begins.
local function by_member(line)
  return redis.call('ZRANGEBYLEX', line, after == '' and '-' or '(' .. after, '+', 'LIMIT', 0, size + 1)
end

-- A job that falls due goes from one line to the other but keeps its place, so both are read as one.
local function by_place()
  local one, other, merged = by_member(ready), by_member(put_off), {}
  local left, right = 1, 1
  while #merged <= size and (one[left] or other[right]) do
    if not other[right] or one[left] and one[left] < other[right] then
      merged[#merged + 1] = one[left]
      left = left + 1
    else
      merged[#merged + 1] = other[right]
      right = right + 1
    end
  end
  return merged
end

local members, skip, marks = nil, 0, nil
if state == 'I' then
  local flat = redis.call(
    'ZRANGEBYSCORE', held, after == '' and '-inf' or '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, size + 1
  )
  members, marks = {}, {}
  for at = 1, #flat, 2 do
    members[#members + 1] = flat[at]
    marks[#marks + 1] = flat[at + 1]
  end
elseif state == 'R' then
  members, skip = by_place(), 38
else
  members, skip = by_member(state == 'S' and succeeded or failed), 15
end

local ids, next_after = {}, ''
for at = 1, math.min(size, #members) do ids[at] = string.sub(members[at], skip + 1) end
local known = known_of(ids)
local last = #known[1]
if #members > last then next_after = (marks or members)[last] end
return {next_after, {unpack(ids, 1, last)}, unpack(known)}
