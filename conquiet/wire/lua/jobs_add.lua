-- Adds jobs, all of them or none.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, number of jobs, error of a replaced job, then for each run of jobs that are alike: priority as in records, delay ms or '='
--        and the moment ms, own limit of retries or '-', what the first line ends with, '' or, separated by spaces, how a
--        unique key is held, for how many ms, 1 if it may be taken from a job that waits, and the key; length of the run,
--        then for each job its ID and what follows the first line
-- RETURNS {} | {'', ID, ID of the job that has its unique key...}: these were left out | {IDs that are taken...}: nothing
--        was added
-- MEMORY adds: jobs
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
--#include jobs_waits
--#include jobs_wake
--#include jobs_change
--#include jobs_unique
local offset, total, replaced = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local now = now_ms(offset)

local ids, runs, at, given = {}, {}, 4, 0
while at <= #ARGV do
  local first, last = at + 6, at + 5 + 2 * tonumber(ARGV[at + 5])
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
local left_out, holding = {''}, {}

-- Whether a job gets its unique key. Another that waits may have to give it up, but none of this call.
local function gets(id, word)
  local mode, within, replaces, key = string.match(word, '^(%u) (%d+) (%d) (.*)$')
  local holder = holding[key] or holder_of(key, now)
  local job = holder and replaces == '1' and not holding[key] and job_of(holder)
  if job and job.state == 'R' then
    note_error(job, redis.call('HGET', errors, holder), replaced)
    leave_line(job)
    fail(job, now)
    keep(holder, written(job))
  elseif holder then
    left_out[#left_out + 1] = id
    left_out[#left_out + 1] = holder
    return false
  end
  holding[key] = id
  hold(key, id, mode, within, now)
  return true
end

local number = redis.call('INCRBY', sequence, total) - total
local firsts, digits = {}, {[0] = '0', '1', '2', '3', '4', '5', '6', '7', '8', '9'}
for _, head in ipairs(runs) do
  local priority, delay, most, shape, unique_word, length = unpack(ARGV, head, head + 5)
  local moment = string.match(delay, '^=(%d+)$')
  local due = moment and math.max(now, tonumber(moment)) or now + tonumber(delay)
  local prefix = priority .. in_digits(due)
  local begin, ending = string.format('%d %d ', now, due) .. priority .. ' ', ' ' .. most .. ' 0' .. shape .. '\n'
  local line, score = now_ready, '0'
  if due > now then
    line, score = now_delayed, string.format('%d', due)
    soonest = math.min(soonest, due)
  else
    note_wait(priority, due)
  end
  local put, noted, tens, last = #line, #firsts, nil, 9
  for word = head + 6, head + 5 + 2 * tonumber(length), 2 do
    number, last = number + 1, last + 1
    if last > 9 or not tens then
      last = number % 10
      tens = string.format('%011d', (number - last) / 10)
    end
    local id = ARGV[word]
    if unique_word == '' or gets(id, unique_word) then
      firsts[noted + 1], firsts[noted + 2] = id, begin .. tens .. digits[last] .. ending .. ARGV[word + 1]
      line[put + 1], line[put + 2] = score, prefix .. tens .. digits[last] .. '0' .. id
      noted, put = noted + 2, put + 2
    end
  end
end
for place = 2, #now_delayed, 2 do
  now_put_off[place - 1] = '0'
  now_put_off[place] = now_delayed[place]
end
tell(now)
in_pieces('HSET', jobs, firsts)
write_down()
return #left_out > 1 and left_out or {}
