-- Takes streams that no consumer has had yet, as many as the caller's share allows, and sets aside what is none.
-- KEYS   input, owners, leases, epochs, members
-- ARGV   group, owner, ttl ms, offset ms, mutex (the beginning of its keys), bad, how many to look at, most, how many it
--        has, hungry ('1': its share does not matter)
-- RETURNS {streams as {name, entry, epoch, entry ID}, set aside, merged, deferred, ID of the last entry}
--         deferred: 1 if others are to have what there may be
-- MEMORY keeps: what was handed in gets an owner who can finish it
--#include clock
--#include balance_state
--#include balance_entry
--#include full_memory
local input, owners, leases, epochs, members = unpack(KEYS)
local group, owner, ttl, offset, mutex, bad, look, most, has_now, hungry = unpack(ARGV)
local now = now_ms(offset)
most, has_now = tonumber(most), tonumber(has_now)

local room = most
if hungry ~= '1' then
  local alive = redis.call('ZCOUNT', members, string.format('(%.0f', now - tonumber(ttl)), '+inf')
  local unfinished = math.max(redis.call('HLEN', owners), redis.call('ZCARD', leases) + 1)
  room = math.min(most, math.ceil(unfinished / math.max(alive, 1)) - has_now)
end

go_on_when_full(owners)
local taken, aside, merged, bytes = {}, 0, 0, 0
for _ = 1, math.min(room, tonumber(look)) do
  -- One by one: what was read has to be dealt with, and its length is not known before.
  local reply = bytes <= MOST_BYTES
    and redis.call('XREADGROUP', 'GROUP', group, owner, 'COUNT', 1, 'STREAMS', input, '>')
  if not reply then break end
  local id, fields = reply[1][2][1][1], reply[1][2][1][2]
  local value = value_of(fields)
  local name, reason = name_in(value)
  bytes = bytes + #(value or '')
  if not name then
    aside = aside + set_aside(input, group, bad, id, fields, reason)
  else
    local known, _, holder = state_of(owners, name)
    if known and known ~= id then
      forget_entry(input, group, id) -- it was handed in twice, past the check
      merged = merged + 1
    elseif known and is_held(leases, name, holder, now) then
      redis.call('XCLAIM', input, group, holder, 0, id, 'JUSTID') -- claimed before it was ever delivered
    else
      local epoch = give(owners, leases, epochs, mutex, name, id, owner, ttl, now)
      taken[#taken + 1] = {name, value, epoch, id}
    end
  end
end
local last = redis.call('XREVRANGE', input, '+', '-', 'COUNT', 1)[1]
return {taken, aside, merged, room < most and 1 or 0, last and last[1] or '0-0'}
