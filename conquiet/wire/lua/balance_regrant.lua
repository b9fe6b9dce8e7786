-- Gives the caller anew, in a new epoch, what it is recorded as having: it says that it was never told.
-- KEYS   input, owners, leases, epochs
-- ARGV   owner, ttl ms, offset ms, mutex (the beginning of its keys), then IDs of entries
-- RETURNS {streams as {name, entry, epoch, entry ID}, how many of the IDs were looked at}
-- MEMORY keeps: the owner goes on with what it has
--#include clock
--#include balance_state
--#include balance_entry
--#include full_memory
local input, owners, leases, epochs = unpack(KEYS)
local owner, ttl, offset, mutex = unpack(ARGV)
local now = now_ms(offset)
go_on_when_full(leases)
local given, seen, bytes = {}, 0, 0
for at = 5, #ARGV do
  if bytes > MOST_BYTES then break end
  local id = ARGV[at]
  local entry = redis.call('XRANGE', input, id, id)[1]
  local value = entry and value_of(entry[2])
  local name = value and name_in(value)
  if name then
    local known, _, holder = state_of(owners, name)
    if known == id and holder == owner and is_held(leases, name, holder, now) then
      given[#given + 1] = {name, value, give(owners, leases, epochs, mutex, name, id, owner, ttl, now), id}
    end
  end
  bytes = bytes + #(value or '')
  seen = seen + 1
end
return {given, seen}
