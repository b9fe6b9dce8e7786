-- Fragment: who has a stream. A HASH from stream name to entry ID, epoch and owner; the owner is empty while nobody has
-- it. A ZSET of all that were ever given out and are unfinished, by deadline in ms; released ones have the deadline 0.
-- Beside it, for people and for the expiry hint, one STRING a stream that ends with the lease.

local FIELD = 'lbs-input' -- the one field of an entry that counts

-- What an entry holds; nil if it has not the field.
local function value_of(fields)
  for at = 1, #fields, 2 do
    if fields[at] == FIELD then return fields[at + 1] end
  end
end

-- The entry ID, epoch and owner of a stream; nil if it is unknown.
local function state_of(owners, name)
  local held = redis.call('HGET', owners, name)
  if held then return string.match(held, '^([^|]*)|([^|]*)|(.*)$') end
end

-- Gives a stream to an owner in a new epoch.
local function give(owners, leases, epochs, mutex, name, id, owner, ttl, now)
  local epoch = tostring(redis.call('INCR', epochs))
  redis.call('HSET', owners, name, id .. '|' .. epoch .. '|' .. owner)
  redis.call('ZADD', leases, string.format('%.0f', now + tonumber(ttl)), name)
  redis.call('SET', mutex .. name, owner, 'PX', ttl)
  return epoch
end

-- Whether somebody has it at this time.
local function is_held(leases, name, owner, now)
  local deadline = redis.call('ZSCORE', leases, name)
  return owner ~= '' and deadline and tonumber(deadline) > now
end

-- Whether the caller has it, whatever the clock says: nobody has taken it since.
local function has(owners, name, owner, epoch)
  local _, current, holder = state_of(owners, name)
  return holder == owner and current == epoch
end
