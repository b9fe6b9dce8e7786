-- Takes one stream over, unless a consumer has it. If that is the caller, without knowing, it has it in a new epoch.
-- KEYS   input, owners, leases, epochs
-- ARGV   group, owner, ttl ms, offset ms, mutex (the beginning of its keys), name, epoch in which the caller knows that
--        it has it ('' if it does not)
-- RETURNS {'OK', entry, epoch, entry ID} | {'HELD', owner} | {'UNKNOWN'}
-- MEMORY keeps: another consumer has what was there
--#include clock
--#include balance_state
--#include full_memory
local input, owners, leases, epochs = unpack(KEYS)
local group, owner, ttl, offset, mutex, name, known = unpack(ARGV)
local now = now_ms(offset)
local id, epoch, holder = state_of(owners, name)
local entry = id and redis.call('XRANGE', input, id, id)[1]
if not entry then return {'UNKNOWN'} end
if is_held(leases, name, holder, now) and (holder ~= owner or epoch == known) then return {'HELD', holder} end
go_on_when_full(owners)
redis.call('XCLAIM', input, group, owner, 0, id, 'FORCE', 'JUSTID')
return {'OK', value_of(entry[2]) or '', give(owners, leases, epochs, mutex, name, id, owner, ttl, now), id}
