-- Looks at pending entries that nobody keeps a lease for, which another kind of client may have left: streams become
-- claimable, the rest is set aside. Names of consumers that are gone, and have nothing pending, are forgotten.
-- KEYS   input, owners, leases, bad, members
-- ARGV   group, ttl ms, ID to begin after or '-', how many to look at
-- RETURNS {ID to go on after or '', set aside, found}
--#include balance_state
--#include balance_entry
local input, owners, leases, bad, members = unpack(KEYS)
local group, ttl, after, look = unpack(ARGV)
local first = after == '-' and '-' or '(' .. after
local rows = redis.call('XPENDING', input, group, 'IDLE', ttl, first, '+', look)
local aside, found = 0, 0
for _, row in ipairs(rows) do
  local id = row[1]
  local entry = redis.call('XRANGE', input, id, id)[1]
  if not entry then
    redis.call('XACK', input, group, id)
  else
    local name, reason = name_in(value_of(entry[2]))
    local known = name and state_of(owners, name)
    if not name then
      set_aside(input, group, bad, id, entry[2], reason)
      aside = aside + 1
    elseif not known or (known == id and not redis.call('ZSCORE', leases, name)) then
      if not known then redis.call('HSET', owners, name, id .. '|0|') end
      redis.call('ZADD', leases, 0, name)
      found = found + 1
    elseif known ~= id then
      forget_entry(input, group, id)
    end
  end
end

if after == '-' then
  for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', input, group)) do
    local about = {}
    for at = 1, #row, 2 do about[row[at]] = row[at + 1] end
    if about.pending == 0 and about.idle > tonumber(ttl) and not redis.call('ZSCORE', members, about.name) then
      redis.call('XGROUP', 'DELCONSUMER', input, group, about.name)
    end
  end
end
return {#rows == tonumber(look) and rows[#rows][1] or '', aside, found}
