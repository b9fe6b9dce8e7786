-- Fragment: the one lease. A HASH of owner, epoch and until_ms by server time, without a TTL: the epoch stays when
-- the owner goes, so it never begins again. It outlives its group and its topic by a day.

-- Whether the caller still holds it. Owner and epoch decide, never the clock: a late call of an owner whom nobody
-- has replaced is still good.
local function holds(lease, owner, epoch)
  local held = redis.call('HMGET', lease, 'owner', 'epoch')
  return held[1] == owner and held[2] == epoch
end

-- Who else holds it now, and for how many ms more; nil if it is free or the caller's own.
local function held_by_other(lease, owner, now)
  local held = redis.call('HMGET', lease, 'owner', 'until_ms')
  if held[1] and held[1] ~= '' and held[1] ~= owner and tonumber(held[2]) > now then
    return held[1], tonumber(held[2]) - now
  end
end

-- Begins the next epoch: whoever held the lease is fenced off. An epoch is at least the server's time in ms: so one
-- that the server forgot, with its last writes, is not given a second time.
local function next_epoch(lease, now)
  local last = tonumber(redis.call('HGET', lease, 'epoch') or '0')
  local epoch = string.format('%.0f', math.max(last + 1, now))
  redis.call('HSET', lease, 'epoch', epoch)
  redis.call('PERSIST', lease)
  return epoch
end

-- Takes a lease that nobody else holds: its epoch, and the owner before who did not release it, or ''.
local function acquire(lease, owner, ttl, now)
  local previous = redis.call('HGET', lease, 'owner') or ''
  redis.call('HSET', lease, 'owner', owner, 'until_ms', string.format('%.0f', now + tonumber(ttl)))
  -- Also for the same owner: what it has under way under the lease that it forgot must not count.
  return next_epoch(lease, now), previous ~= owner and previous or ''
end

-- Gives it up. The time stays, and tells when it was last held.
local function release(lease)
  redis.call('HSET', lease, 'owner', '')
end

-- Ends it with its group or topic: the owner is fenced off. Only the epoch stays, for a day.
local function retire(lease, now)
  redis.call('HDEL', lease, 'owner', 'until_ms', 'running', 'crashed', 'suspect', 'resume', 'resets', 'spark')
  redis.call('HDEL', lease, 'deleted_ms')
  next_epoch(lease, now)
  redis.call('PEXPIRE', lease, 86400000)
end
