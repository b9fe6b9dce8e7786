-- A stream is done with: it is forgotten, as is its entry.
-- KEYS   input, owners, leases, positions
-- ARGV   group, owner, epoch, mutex (the beginning of its keys), name, entry ID
-- RETURNS 1 done | 0 another consumer has it, or none | -1 there is no such entry any more
-- MEMORY frees: the stream and its entry are forgotten
--#include balance_state
--#include full_memory
local input, owners, leases, positions = unpack(KEYS)
local group, owner, epoch, mutex, name, entry = unpack(ARGV)
local id = state_of(owners, name)
if id ~= entry then return -1 end
if not has(owners, name, owner, epoch) then return 0 end
go_on_when_full(owners)
redis.call('XACK', input, group, id)
redis.call('XDEL', input, id)
redis.call('HDEL', owners, name)
redis.call('ZREM', leases, name)
redis.call('HDEL', positions, name)
hide(mutex, name)
return 1
