-- Fragment: who waits for jobs, and how some of them are told. Needs the fragment jobs_keys.
-- The key `idle` has the name of each store at which a worker waits, by the moment until which it counts. A store listens to
-- a stream of its own, whose key is that of `news`, a colon and the name; an entry there says for how many jobs it is. A
-- store that is told is not idle until it has looked. The key `alarm` has the next moment at which something falls due,
-- and which of the idle stores looks then.

-- The moment of the alarm, and the store that looks then; nil if there is none.
local function alarm_set()
  local at, keeper = string.match(redis.call('GET', alarm) or '', '^(%d+) (.*)$')
  return tonumber(at), keeper
end

-- Tells up to so many, and first those that came last, which are the likeliest to be still there; how many it has told.
-- Who has to look at a moment is spared if there are others.
local function wake(now, most)
  local names = redis.call('ZREVRANGEBYSCORE', idle, '+inf', string.format('(%d', now), 'LIMIT', 0, most + 1)
  if #names > 1 then
    local _, keeper = alarm_set()
    for at, name in ipairs(names) do
      if name == keeper then names[#names + 1] = table.remove(names, at) break end
    end
  end
  if #names > most then names[#names] = nil end
  for _, name in ipairs(names) do
    local own = news .. ':' .. name
    redis.call('ZREM', idle, name)
    redis.call('XADD', own, 'MAXLEN', 10, '*', 'n', math.ceil(most / #names))
    redis.call('PEXPIRE', own, 60000)
  end
  return #names
end

-- Tells all who listen to the queue: those who are not known as idle, and workers of an older version.
local function tell_all()
  redis.call('XADD', news, 'MAXLEN', 1, '*', 'n', '')
end

local function last_of(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return last and last[1] or '0-0'
end

-- A store at which a worker will wait, for longer than it waits without a look.
local function stay(now, name)
  redis.call('ZREMRANGEBYSCORE', idle, '-inf', now)
  redis.call('ZADD', idle, now + 10000, name)
end

-- Whether this one, which waits, is to look at that moment, rather than another that waits as well.
local function is_to_look(now, name, next_at)
  local at, keeper = alarm_set()
  if keeper and keeper ~= name and at > now and at <= next_at then
    if tonumber(redis.call('ZSCORE', idle, keeper) or 0) > now then return false end
  end
  redis.call('SET', alarm, string.format('%d ', next_at) .. name, 'PX', math.min(next_at - now, 86400000) + 10000)
  return true
end

-- A store at which no worker waits any longer; whether another has to look at a moment instead.
local function part(name)
  redis.call('ZREM', idle, name)
  local _, keeper = alarm_set()
  return keeper == name and redis.call('DEL', alarm) == 1
end
