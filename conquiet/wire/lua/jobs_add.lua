-- Adds jobs, all of them or none.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, number of jobs, then for each run of jobs that are alike: priority as in records, delay ms, own
--        limit of retries or '-', length of the run, then for each job its ID and its payload
-- RETURNS {} | {IDs that are taken...}: nothing was added
-- MEMORY adds: jobs
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
--#include jobs_waits
--#include jobs_wake
--#include jobs_change
local offset, total = ARGV[1], tonumber(ARGV[2])
local now = now_ms(offset)

local ids, runs, at, given = {}, {}, 3, 0
while at <= #ARGV do
  local first, last = at + 4, at + 3 + 2 * tonumber(ARGV[at + 3])
  runs[#runs + 1] = at
  for word = first, last, 2 do
    given = given + 1
    ids[given] = ARGV[word]
  end
  at = last + 1
end

-- Some at once while none is taken; one by one after that, since with an ID the payload comes along.
local taken, from = {}, 1
while from <= #ids do
  local to = #taken == 0 and math.min(from + 15, #ids) or from
  if to > from or #taken == 0 then
    local known = redis.call('HMGET', jobs, unpack(ids, from, to))
    for place, there in ipairs(known) do
      if there then taken[#taken + 1] = ids[from + place - 1] end
    end
  elseif redis.call('HEXISTS', jobs, ids[from]) == 1 then
    taken[#taken + 1] = ids[from]
  end
  from = to + 1
end
if #taken > 0 then return taken end

stop_when_full(sequence)
local number = redis.call('INCRBY', sequence, total) - total
local firsts, digits = {}, {[0] = '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'}
for _, head in ipairs(runs) do
  local priority, delay, most, length = unpack(ARGV, head, head + 3)
  local due = now + tonumber(delay)
  local prefix = priority .. in_digits(due)
  local begin, ending = string.format('%d %d ', now, due) .. priority .. ' ', ' ' .. most .. ' 0\n'
  local line, score = now_ready, '0'
  if due > now then
    line, score = now_delayed, string.format('%d', due)
    soonest = math.min(soonest, due)
  else
    note_wait(priority, due)
  end
  local put, noted, tens, last = #line, #firsts, nil, 9
  for word = head + 4, head + 3 + 2 * tonumber(length), 2 do
    number, last = number + 1, last + 1
    if last > 9 or not tens then
      last = number % 10
      tens = string.format('%011d', (number - last) / 10)
    end
    local id = ARGV[word]
    firsts[noted + 1], firsts[noted + 2] = id, begin .. tens .. digits[last] .. ending .. ARGV[word + 1]
    line[put + 1], line[put + 2] = score, prefix .. tens .. digits[last] .. '0' .. id
    noted, put = noted + 2, put + 2
  end
end
for place = 2, #now_delayed, 2 do
  now_put_off[place - 1] = '0'
  now_put_off[place] = now_delayed[place]
end
tell(now)
in_pieces('HSET', jobs, firsts)
write_down()
return {}
