-- Leaves failed entries pending under their IDs and notes when each is to be tried again.
-- KEYS   lease, stream, retry, attempts
-- ARGV   owner, epoch, offset ms, group, then for each entry: ID, delay ms, failures so far, error type
-- RETURNS {0} lost | {1, entries parked}
-- MEMORY adds: a record of each failure, without which the entry stays with its owner
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
    put_off(retry, attempts, id, now, delay, failures, kind)
    parked = parked + 1
  end
end
return {1, parked}
