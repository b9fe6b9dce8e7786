-- A stream is done with: it is forgotten, as is its entry.
-- KEYS   input, owners, leases, positions, mutex (the beginning of its keys)
-- ARGV   group, owner, epoch, name
-- RETURNS 1 done | 0 somebody else has it, or nobody
--#include balance_state
local input, owners, leases, positions, mutex = unpack(KEYS)
local group, owner, epoch, name = unpack(ARGV)
if not has(owners, name, owner, epoch) then return 0 end
local id = state_of(owners, name)
redis.call('XACK', input, group, id)
redis.call('XDEL', input, id)
redis.call('HDEL', owners, name)
redis.call('ZREM', leases, name)
redis.call('HDEL', positions, name)
redis.call('DEL', mutex .. name)
return 1
