-- Takes one stream over, unless somebody has it.
-- KEYS   input, owners, leases, epochs, mutex (the beginning of its keys)
-- ARGV   group, owner, ttl ms, offset ms, name
-- RETURNS {'OK', entry, epoch, entry ID} | {'HELD', owner} | {'UNKNOWN'}
--#include clock
--#include balance_state
local input, owners, leases, epochs, mutex = unpack(KEYS)
local group, owner, ttl, offset, name = unpack(ARGV)
local now = now_ms(offset)
local id, _, holder = state_of(owners, name)
local entry = id and redis.call('XRANGE', input, id, id)[1]
if not entry then return {'UNKNOWN'} end
if is_held(leases, name, holder, now) then return {'HELD', holder} end
redis.call('XCLAIM', input, group, owner, 0, id, 'FORCE', 'JUSTID')
return {'OK', value_of(entry[2]) or '', give(owners, leases, epochs, mutex, name, id, owner, ttl, now), id}
