-- Fragment: what is kept of a job, and how it is written. Needs the fragment jobs_keys.
--   jobs     "enqueued ready priority sequence most token\n", then the payload; written once. Times are ms, priority
--            has 10 digits and is the lower the sooner, sequence has 12 digits, most is "-" or the job's own limit of
--            retries. The last word was a token once and means nothing now.
--   records  "state finished attempts token claimed ready priority sequence most length ", then worker and result.
--            There is none while a job has never been claimed or cancelled. state is R, I, S or F, and "-" stands for
--            a time or a worker's length that there is not. token is a number, then "." and the claim's own ID; a
--            claim is told from all others by both.
--   errors   "count length\n", the last error, then for each failed attempt
--            "number started ended length length\n", its worker and its error.
--   ready... members: priority, ready in 15 digits, sequence, "1" if tried before else "0", ID: in claim order.

local function in_digits(ms)
  return string.format('%015d', ms)
end

-- A record as a table; nil if it is none.
local function parsed(id, text)
  local state, finished, attempts, token, claimed, since, priority, number, most, length, body =
    string.match(text, '^([RISF]) (%S+) (%d+) (%S+) (%S+) (%d+) (%d+) (%d+) (%S+) (%S+) (.*)$')
  if not state then return nil end
  return {
    id = id, state = state, finished = finished, attempts = tonumber(attempts), token = token,
    claimed = claimed, ready = tonumber(since), priority = priority, number = number, most = most,
    worker = length ~= '-' and string.sub(body, 1, tonumber(length)) or nil,
  }
end

-- The record of a job that has none yet; nil if what was written at first is no job.
local function unwritten(id, first)
  local since, priority, number, most = string.match(first, '^%d+ (%d+) (%d+) (%d+) (%S+) %d+\n')
  if not since then return nil end
  return {
    id = id, state = 'R', finished = '-', attempts = 0, token = '0',
    claimed = '-', ready = tonumber(since), priority = priority, number = number, most = most,
  }
end

local function written(job)
  local worker = job.worker
  return string.format(
    '%s %s %d %s %s %d %s %s %s ', job.state, job.finished, job.attempts, job.token, job.claimed, job.ready,
    job.priority, job.number, job.most
  ) .. (worker and #worker or '-') .. ' ' .. (worker or '')
end

-- What follows the claimed time in the record of a job whose first writing this is, up to its worker.
local function since_first(first)
  return string.match(first, '^%d+ (%d+ %d+ %d+ %S+) %d+\n')
end

-- The number in a token.
local function number_of(token)
  return tonumber(string.match(token, '^%d+'))
end

-- Where a job stands among all that are ready; the same as long as it is.
local function place_of(job)
  return job.priority .. in_digits(job.ready) .. job.number .. (job.attempts > 0 and '1' or '0') .. job.id
end

-- The job of an ID: its record or, if it has none yet, as it was at first; nil if there is no such job.
local function job_of(id)
  local text = redis.call('HGET', records, id)
  if text then return parsed(id, text) end
  local first = redis.call('HGET', jobs, id)
  return first and unwritten(id, first) or nil
end

-- All that is known of jobs: {first writings, records, errors, until when leased}; of the first ones only, if that comes to
-- much. Some at a time, since any may be large.
local function known_of(ids)
  local lists, size, most_bytes = {{}, {}, {}, {}}, 0, 8 * 1024 * 1024
  for from = 1, #ids, 8 do
    if size >= most_bytes then break end
    local to = math.min(from + 7, #ids)
    for place, key in ipairs({jobs, records, errors, leases}) do
      local list = lists[place]
      for _, value in ipairs(redis.call(key == leases and 'ZMSCORE' or 'HMGET', key, unpack(ids, from, to))) do
        list[#list + 1] = value
        size = size + (value and #value or 0)
      end
    end
  end
  return lists
end

-- The records of those that have a lease, as only jobs in flight have; false for the others, which are not even read: a
-- finished job's record has its result, of whatever size.
local function leased_records(ids)
  local their, at_of, found = {}, {}, {}
  for from = 1, #ids, 4000 do
    local untils = redis.call('ZMSCORE', leases, unpack(ids, from, math.min(from + 3999, #ids)))
    for at, until_ms in ipairs(untils) do
      local place = from + at - 1
      found[place] = false
      if until_ms then
        their[#their + 1] = ids[place]
        at_of[#their] = place
      end
    end
  end
  for at, text in ipairs(values_of(records, their)) do found[at_of[at]] = text end
  return found
end
