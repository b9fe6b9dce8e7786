-- Fragment: entries on the pending list.
local function is_pending(stream, group, id)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

-- The fields of an entry; nil if it was deleted or trimmed away.
local function fields_of(stream, id)
  local found = redis.call('XRANGE', stream, id, id)
  return found[1] and found[1][2]
end

-- Takes an entry off the pending list, and all that is known of its failures.
local function settle(stream, group, attempts, id)
  redis.call('HDEL', attempts, id, 'c:' .. id)
  return redis.call('XACK', stream, group, id)
end
