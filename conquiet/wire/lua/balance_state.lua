-- Fragment: who has a stream. A HASH from stream name to entry ID, epoch and owner; the owner is empty while no consumer has
-- it. A ZSET of all that were ever given out and are unfinished, by deadline in ms; released ones have the deadline 0.
-- Beside it, for people and for the expiry hint, one STRING a stream that ends with the lease.
--
-- A Cluster runs a script whose slot moves only if all of KEYS are there. So what may not be there is no key but an
-- argument: the STRINGs above, the stream of news, and what was set aside. Nothing is decided by them, and whatever
-- goes wrong with them does no harm.

local FIELD = 'lbs-input' -- the one field of an entry that counts

-- No call looks at more than that, so that others have to wait for a moment only.
local MOST_BYTES = 262144

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

-- Higher than all before it, also than those that a server forgot which lost its last writes.
local function next_epoch(epochs, now)
  local last = tonumber(redis.call('GET', epochs) or 0)
  local epoch = string.format('%.0f', math.max(last + 1, now))
  redis.call('SET', epochs, epoch)
  return epoch
end

-- Shows who has a stream, for people and for the expiry hint.
local function show(mutex, name, owner, ttl)
  redis.pcall('SET', mutex .. name, owner, 'PX', ttl)
end

local function hide(mutex, name)
  redis.pcall('DEL', mutex .. name)
end

-- Gives a stream to an owner in a new epoch.
local function give(owners, leases, epochs, mutex, name, id, owner, ttl, now)
  local epoch = next_epoch(epochs, now)
  redis.call('HSET', owners, name, id .. '|' .. epoch .. '|' .. owner)
  redis.call('ZADD', leases, string.format('%.0f', now + tonumber(ttl)), name)
  show(mutex, name, owner, ttl)
  return epoch
end

-- Whether a consumer has it at this time.
local function is_held(leases, name, owner, now)
  local deadline = redis.call('ZSCORE', leases, name)
  return owner ~= '' and deadline and tonumber(deadline) > now
end

-- Whether the caller has it, whatever the clock says: no other has taken it since.
local function has(owners, name, owner, epoch)
  local _, current, holder = state_of(owners, name)
  return holder == owner and current == epoch
end
