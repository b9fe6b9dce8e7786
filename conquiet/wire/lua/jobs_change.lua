-- Fragment: changing jobs, all writes of one kind at once. Needs the fragments jobs_keys, jobs_record, jobs_waits and
-- jobs_wake.

local written_records, written_errors, unleased, over = {}, {}, {}, {}
local now_ready, now_retries, now_delayed, now_put_off = {}, {}, {}, {}
local now_succeeded, now_failed = {}, {}
local soonest = math.huge

local function keep(id, text)
  written_records[#written_records + 1] = id
  written_records[#written_records + 1] = text
end

-- In line among the ready ones, or among those whose time has not come.
local function line_up(job, now)
  local place = place_of(job)
  if job.ready > now then
    soonest = math.min(soonest, job.ready)
    now_delayed[#now_delayed + 1] = string.format('%d', job.ready)
    now_delayed[#now_delayed + 1] = place
    now_put_off[#now_put_off + 1] = '0'
    now_put_off[#now_put_off + 1] = place
    return
  end
  now_ready[#now_ready + 1] = '0'
  now_ready[#now_ready + 1] = place
  note_wait(job.priority, job.ready)
  if job.attempts > 0 then
    now_retries[#now_retries + 1] = '0'
    now_retries[#now_retries + 1] = place
  end
end

local function leave_line(job)
  local place = place_of(job)
  for _, line in ipairs({ready, retries, delayed, put_off}) do redis.call('ZREM', line, place) end
end

-- The job of an ID is over, as of now, in digits.
local function end_in(line, id, now)
  line[#line + 1] = '0'
  line[#line + 1] = now .. id
  over[#over + 1] = id
end

local function fail(job, now)
  job.state, job.finished = 'F', string.format('%d', now)
  end_in(now_failed, job.id, in_digits(now))
end

-- Notes an error as the last one and, with `brief`, that the attempt under way failed by it. `before` is what was noted so
-- far, or false.
local function note_error(job, before, last, brief, at, history)
  before = before or '0 0\n'
  local count, length, from = string.match(before, '^(%d+) (%d+)\n()')
  count = tonumber(count or 0)
  local attempts = count > 0 and string.sub(before, from + tonumber(length)) or ''
  if brief then
    if count >= history then
      local one, other, rest = string.match(attempts, '^%d+ %d+ %d+ (%d+) (%d+)\n()')
      attempts = rest and string.sub(attempts, rest + tonumber(one) + tonumber(other)) or ''
      count = rest and count - 1 or 0
    end
    count = count + 1
    attempts = attempts .. string.format('%d %s %d ', job.attempts, job.claimed, at) .. #(job.worker or '') .. ' '
      .. #brief .. '\n' .. (job.worker or '') .. brief
  end
  written_errors[#written_errors + 1] = job.id
  written_errors[#written_errors + 1] = count .. ' ' .. #last .. '\n' .. last .. attempts
end

-- The first moment at which a job falls due, and that at which a lease runs out; math.huge if there is none.
local function earliest()
  local due = redis.call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2]
  local lapse = redis.call('ZRANGE', leases, 0, 0, 'WITHSCORES')[2]
  return due and tonumber(due) or math.huge, lapse and tonumber(lapse) or math.huge
end

-- Tells as many of those who found nothing to claim as there are jobs that will be ready when all is written, or one if
-- something falls due before a store was going to look. If no store is known to wait, all are told of what is ready where
-- nothing was.
local function tell(now)
  local count, is_sooner = #now_ready / 2, soonest < math.huge and soonest < math.min(earliest())
  if count == 0 and not is_sooner then return end
  if wake(now, math.max(count, 1)) > 0 then return end
  if is_sooner or redis.call('EXISTS', ready) == 0 then tell_all() end
end

-- Writes all that was noted above.
local function write_down()
  in_pieces('HSET', records, written_records)
  in_pieces('HSET', errors, written_errors)
  in_pieces('ZREM', leases, unleased)
  in_pieces('ZREM', held, unleased)
  write_waits()
  in_pieces('ZADD', ready, now_ready)
  in_pieces('ZADD', retries, now_retries)
  in_pieces('ZADD', delayed, now_delayed)
  in_pieces('ZADD', put_off, now_put_off)
  in_pieces('ZADD', succeeded, now_succeeded)
  in_pieces('ZADD', failed, now_failed)
  if #over > 0 and redis.call('EXISTS', watched) == 1 then
    for from = 1, #over, 1000 do
      local fields = {}
      for at = from, math.min(from + 999, #over) do
        fields[#fields + 1] = 'id'
        fields[#fields + 1] = over[at]
      end
      redis.call('XADD', ended, 'MAXLEN', '~', 10000, '*', unpack(fields))
    end
  end
end
