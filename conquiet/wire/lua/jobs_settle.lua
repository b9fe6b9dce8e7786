-- Applies what workers say became of their jobs, each where the token is that of the job's last claim.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, longest history, then for each settlement: kind, ID, token as in records, and of kind
--        'done' no more | 'result' the result | 'retry' delay ms, error, its first line |
--        'fail' error, its first line | 'release' no more
-- RETURNS {1 if applied else 0...}
-- MEMORY keeps: a job that is finished can be removed
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
--#include jobs_waits
--#include jobs_wake
--#include jobs_change
go_on_when_full(jobs)
local history = tonumber(ARGV[2])
local now = now_ms(ARGV[1])
local words = {done = 3, result = 4, retry = 6, fail = 5, release = 3}

local starts, ids, at = {}, {}, 3
while at <= #ARGV do
  starts[#starts + 1] = at
  ids[#ids + 1] = ARGV[at + 1]
  at = at + words[ARGV[at]]
end

local apply = {
  retry = function(job, delay, error, brief)
    note_error(job, redis.call('HGET', errors, job.id), error, brief, now, history)
    job.state, job.ready = 'R', now + tonumber(delay)
    line_up(job, now)
  end,
  fail = function(job, error, brief)
    note_error(job, redis.call('HGET', errors, job.id), error, brief, now, history)
    fail(job, now)
  end,
  release = function(job)
    job.state, job.attempts, job.worker, job.claimed = 'R', job.attempts - 1, nil, '-'
    line_up(job, now)
  end,
}

local replies, is_settled, now_digits, succeeds = {}, {}, in_digits(now), string.format('S %d ', now)
for place, text in ipairs(leased_records(ids)) do
  local id, start = ids[place], starts[place]
  local rest, token = string.match(not is_settled[id] and text or '', '^I %- (%d+ (%S+) .*)$')
  replies[place] = 0
  if token and token == ARGV[start + 2] then
    local kind = ARGV[start]
    if apply[kind] then
      local job = parsed(id, text)
      apply[kind](job, unpack(ARGV, start + 3, start + words[kind] - 1))
      keep(id, written(job))
    else
      end_in(now_succeeded, id, now_digits)
      keep(id, succeeds .. rest .. (kind == 'result' and ARGV[start + 3] or ''))
    end
    unleased[#unleased + 1] = id
    is_settled[id] = true
    replies[place] = 1
  end
end
tell(now)
write_down()
return replies
