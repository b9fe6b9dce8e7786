-- Fragment: one job for a unique key. Needs the fragments jobs_keys and jobs_record.
--   unique       "mode end ID": the job that has a key, or had it last. The mode is F if it has it until it is finished, S
--                until it is started, W until the end, a moment in ms, which is 0 for the others.
--   unique_of    the key of a job, of the modes F and S: it goes with the job. unique_ends has the keys of the mode W.
-- Whether a job has its key still is seen from the job itself, so that no claim and no settlement has to do with this.

-- The ID of the job that has a key; nil if there is none.
local function holder_of(key, now)
  local mode, ending, id = string.match(redis.call('HGET', unique, key) or '', '^(%u) (%d+) (.*)$')
  if not mode then return nil end
  if mode == 'W' then return now < tonumber(ending) and id or nil end
  local text = redis.call('HGET', records, id)
  if not text then return redis.call('HEXISTS', jobs, id) == 1 and id or nil end
  local state, token = string.match(text, '^(%u) %S+ %d+ (%d+)')
  if mode == 'F' then return (state == 'R' or state == 'I') and id or nil end
  return state == 'R' and token == '0' and id or nil
end

-- A job gets a key, for so many ms if the mode is W; and some keys whose time is over are forgotten.
local function hold(key, id, mode, within, now)
  local ending = mode == 'W' and now + tonumber(within) or 0
  redis.call('HSET', unique, key, string.format('%s %d ', mode, ending) .. id)
  if mode ~= 'W' then
    redis.call('HSET', unique_of, id, key)
    redis.call('ZREM', unique_ends, key)
    return
  end
  redis.call('ZADD', unique_ends, ending, key)
  for _, old in ipairs(redis.call('ZRANGEBYSCORE', unique_ends, '-inf', now, 'LIMIT', 0, 10)) do
    redis.call('ZREM', unique_ends, old)
    redis.call('HDEL', unique, old)
  end
end

-- Jobs are removed: their keys go with them, unless others have those now.
local function forget_keys(ids)
  if redis.call('EXISTS', unique_of) == 0 then return end
  for at, key in ipairs(values_of(unique_of, ids)) do
    if key then
      local id = string.match(redis.call('HGET', unique, key) or '', '^[FS] %d+ (.*)$')
      if id == ids[at] then redis.call('HDEL', unique, key) end
    end
  end
  in_pieces('HDEL', unique_of, ids)
end
