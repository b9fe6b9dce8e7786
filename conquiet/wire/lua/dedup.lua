-- Fragment: message IDs that were seen within a window, so that a repeated send is harmless.

-- What one call clears away at most. A limit that was lowered is reached step by step.
local most_forgotten = 100

local function forget_messages(dedup, ids, stale)
  if #stale == 0 then return end
  redis.call('ZREM', dedup, unpack(stale))
  redis.call('HDEL', ids, unpack(stale))
end

-- What the first send of a message gave; nil if there was none within the window. Writes nothing: a send is refused,
-- when memory is full, by the first thing that it writes.
local function seen_message(dedup, ids, message, now, window)
  local sent = redis.call('ZSCORE', dedup, message)
  -- One that is older may still be there: only so many are cleared away at a time.
  if sent and tonumber(sent) >= now - tonumber(window) then return redis.call('HGET', ids, message) or nil end
  return nil
end

-- Remembers a message, and forgets such as are out of the window. All of it runs out when nothing more is sent.
local function note_message(dedup, ids, message, id, now, window, size)
  redis.call('ZADD', dedup, now, message)
  redis.call('HSET', ids, message, id)
  local oldest = '(' .. string.format('%.0f', now - tonumber(window))
  forget_messages(dedup, ids, redis.call('ZRANGEBYSCORE', dedup, '-inf', oldest, 'LIMIT', 0, most_forgotten))
  local over = redis.call('ZCARD', dedup) - tonumber(size)
  if over > 0 then forget_messages(dedup, ids, redis.call('ZRANGE', dedup, 0, math.min(over, most_forgotten) - 1)) end
  if redis.call('PTTL', dedup) < tonumber(window) then
    redis.call('PEXPIRE', dedup, 2 * tonumber(window))
    redis.call('PEXPIRE', ids, 2 * tonumber(window))
  end
end
