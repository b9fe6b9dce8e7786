-- Fragment: entries on the pending list.
local function is_pending(stream, group, id)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

-- The fields of an entry; nil if it was deleted or trimmed away.
local function fields_of(stream, id)
  local found = redis.call('XRANGE', stream, id, id)
  return found[1] and found[1][2]
end

-- Whether a script can append so many words, names and values, as one entry: a call takes about 8,000 of them.
local function is_copyable(words)
  return #words <= 7800
end

-- Notes a failure of an entry that stays pending, and when it is to be tried again.
local function put_off(retry, attempts, id, now, delay, failures, kind)
  local first, replayed = string.match(redis.call('HGET', attempts, id) or '', '^%d+|(%d*)|%d*|[^|]*|(.*)$')
  local ms = string.format('%.0f', now)
  if not first or first == '' then first = ms end
  redis.call('HSET', attempts, id, table.concat({failures, first, ms, kind, replayed or ''}, '|'))
  redis.call('HDEL', attempts, 'c:' .. id)
  redis.call('ZADD', retry, now + tonumber(delay), id)
end

-- Takes an entry off the pending list, and all that is known of its failures.
local function settle(stream, group, attempts, id)
  redis.call('HDEL', attempts, id, 'c:' .. id)
  return redis.call('XACK', stream, group, id)
end
