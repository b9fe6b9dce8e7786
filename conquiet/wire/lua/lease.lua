-- Fragment: the one lease. A HASH of owner, epoch and until_ms by server time, without a TTL: the epoch stays when
-- the owner goes, so it never begins again.

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

-- Takes a lease that nobody else holds: its epoch, and the owner before who did not release it, or ''.
local function acquire(lease, owner, ttl, now)
  local previous = redis.call('HGET', lease, 'owner') or ''
  redis.call('HSET', lease, 'owner', owner, 'until_ms', now + tonumber(ttl))
  -- Also for the same owner: what it has under way under the lease that it forgot must not count.
  return tostring(redis.call('HINCRBY', lease, 'epoch', 1)), previous ~= owner and previous or ''
end

-- Gives it up. The time stays, and tells when it was last held.
local function release(lease)
  redis.call('HSET', lease, 'owner', '')
end
