-- Finds streams whose owner was not heard of in time or has released them, and takes some of them over.
-- KEYS   input, owners, leases, epochs, positions, members
-- ARGV   group, owner, ttl ms, offset ms, mutex (the beginning of its keys), how many to skip, how many to look at, how
--        many to take at most, how many it has, hungry ('1': its share does not matter)
-- RETURNS {taken as {name, entry, epoch, entry ID, owner before}, late as {name, entry, epoch, owner},
--          ms by which the oldest is late or -1, ms until the next is late or -1, how many stay late, 1 if there are
--          more to look at}
-- MEMORY keeps: a stream without an owner gets one that can finish it
--#include clock
--#include balance_state
--#include full_memory
local input, owners, leases, epochs, positions, members = unpack(KEYS)
local group, owner, ttl, offset, mutex, skip, look, most, has_now, hungry = unpack(ARGV)
local now = now_ms(offset)
local room = tonumber(most)
if hungry ~= '1' then
  local alive = redis.call('ZCOUNT', members, string.format('(%.0f', now - tonumber(ttl)), '+inf')
  room = math.min(room, math.ceil(redis.call('ZCARD', leases) / math.max(alive, 1)) - tonumber(has_now))
end

go_on_when_full(leases)
local taken, late, oldest, staying, bytes = {}, {}, -1, 0, 0
-- By rank: to skip by score takes as long as what is skipped is long.
local rows = redis.call('ZRANGE', leases, skip, skip + look - 1, 'WITHSCORES')
local more = #rows == 2 * look and 1 or 0
for at = 1, #rows, 2 do
  local name, deadline = rows[at], tonumber(rows[at + 1])
  if deadline > now then
    more = 0
    break
  end
  if bytes > MOST_BYTES then
    more = 1
    break
  end
  local id, epoch, before = state_of(owners, name)
  local entry = id and redis.call('XRANGE', input, id, id)[1]
  if not entry then
    -- Its entry was removed: there is nothing left to own.
    redis.call('ZREM', leases, name)
    redis.call('HDEL', owners, name)
    redis.call('HDEL', positions, name)
    hide(mutex, name)
  elseif before ~= owner or deadline + tonumber(ttl) / 10 < now then -- its own it may still be about to renew
    if deadline > 0 then oldest = math.max(oldest, now - deadline) end
    local value = value_of(entry[2]) or ''
    bytes = bytes + #value
    if room > 0 then
      room = room - 1
      redis.call('XCLAIM', input, group, owner, 0, id, 'FORCE', 'JUSTID')
      taken[#taken + 1] = {name, value, give(owners, leases, epochs, mutex, name, id, owner, ttl, now), id, before}
    else
      late[#late + 1] = {name, value, epoch, before}
      staying = staying + 1
    end
  else
    staying = staying + 1
  end
end
local following = redis.call('ZRANGEBYSCORE', leases, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
return {taken, late, oldest, following and tonumber(following) - now or -1, staying, more}
