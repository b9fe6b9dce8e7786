-- Leaves failed entries pending under their IDs and notes when each is to be tried again.
-- KEYS   lease, stream, retry, attempts
-- ARGV   owner, epoch, offset ms, group, then for each entry: ID, delay ms, failures so far, error type
-- RETURNS {0} lost | {1, entries parked}
--#include clock
--#include lease
--#include pending
local lease, stream, retry, attempts = unpack(KEYS)
local owner, epoch, offset, group = unpack(ARGV, 1, 4)
if not holds(lease, owner, epoch) then return {0} end
local now, parked = now_ms(offset), 0
for at = 5, #ARGV, 4 do
  local id, delay, failures, kind = unpack(ARGV, at, at + 3)
  if is_pending(stream, group, id) then
    local first, replayed = string.match(redis.call('HGET', attempts, id) or '', '^%d+|(%d*)|%d*|[^|]*|(.*)$')
    if not first or first == '' then first = string.format('%.0f', now) end
    redis.call('HSET', attempts, id, table.concat({failures, first, string.format('%.0f', now), kind, replayed or ''}, '|'))
    redis.call('HDEL', attempts, 'c:' .. id)
    redis.call('ZADD', retry, now + tonumber(delay), id)
    parked = parked + 1
  end
end
return {1, parked}
