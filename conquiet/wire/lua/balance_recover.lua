-- Looks at pending entries without a lease, which another kind of client may have left: streams become
-- claimable, the rest is set aside. Names of consumers that are gone, and have nothing pending, are forgotten.
-- KEYS   input, owners, leases, members
-- ARGV   group, ttl ms, bad, ID to begin after or '-', how many to look at
-- RETURNS {ID to go on after or '', set aside, found}
-- MEMORY keeps: what was handed in gets an owner who can finish it
--#include balance_state
--#include balance_entry
--#include full_memory
local input, owners, leases, members = unpack(KEYS)
local group, ttl, bad, after, look = unpack(ARGV)
go_on_when_full(leases)
local first = after == '-' and '-' or '(' .. after
-- Not by IDLE, which looks at all that are not idle until it has found enough.
local rows = redis.call('XPENDING', input, group, first, '+', look)
local aside, found, bytes = 0, 0, 0
local following = #rows == tonumber(look) and rows[#rows][1] or ''

local function look_at(id)
  local entry = redis.call('XRANGE', input, id, id)[1]
  if not entry then
    redis.call('XACK', input, group, id)
    return
  end
  local value = value_of(entry[2])
  local name, reason = name_in(value)
  local known = name and state_of(owners, name)
  bytes = bytes + #(value or '')
  if not name then
    aside = aside + set_aside(input, group, bad, id, entry[2], reason)
  elseif not known or (known == id and not redis.call('ZSCORE', leases, name)) then
    if not known then redis.call('HSET', owners, name, id .. '|0|') end
    redis.call('ZADD', leases, 0, name)
    found = found + 1
  elseif known ~= id then
    forget_entry(input, group, id)
  end
end

for _, row in ipairs(rows) do
  if row[3] >= tonumber(ttl) then look_at(row[1]) end
  if bytes > MOST_BYTES then
    following = row[1]
    break
  end
end

if after == '-' then
  local left = 100
  for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', input, group)) do
    local about = {}
    for at = 1, #row, 2 do about[row[at]] = row[at + 1] end
    if left > 0 and about.pending == 0 and about.idle > tonumber(ttl) and not redis.call('ZSCORE', members, about.name) then
      redis.call('XGROUP', 'DELCONSUMER', input, group, about.name)
      left = left - 1
    end
  end
end
return {following, aside, found}
