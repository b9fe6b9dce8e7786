-- Acknowledges failed entries and puts a copy of each, addressed to the same group, back behind the others: at once
-- or, through the delayed bucket, later. One that is too wide to be copied is parked, one that is gone is settled.
-- KEYS   lease, stream, attempts, delayed, delayed items, retry
-- ARGV   owner, epoch, offset ms, group, then for each entry: ID, delay ms, failures so far, first entry "partition/ID"
-- RETURNS {0} lost | {1, entries requeued or parked}
-- MEMORY adds: a copy of each entry, which stays pending until there is room for it
--#include clock
--#include lease
--#include pending
local lease, stream, attempts, delayed, items, retry = unpack(KEYS)
local owner, epoch, offset, group = unpack(ARGV, 1, 4)
if not holds(lease, owner, epoch) then return {0} end
local replaced = {retryCount = true, originalMessageId = true, onlyGroup = true}
local now, requeued, gone = now_ms(offset), 0, {}

local function copy_of(fields, ...)
  local copy = {}
  for field = 1, #fields, 2 do
    if not replaced[fields[field]] then
      copy[#copy + 1] = fields[field]
      copy[#copy + 1] = fields[field + 1]
    end
  end
  -- Last, where the mover looks for them.
  for _, word in ipairs({...}) do copy[#copy + 1] = word end
  return copy
end

for at = 5, #ARGV, 4 do
  local id, delay, failures, original = unpack(ARGV, at, at + 3)
  local is_there = is_pending(stream, group, id)
  local fields = is_there and fields_of(stream, id)
  local copy = fields and copy_of(fields, 'retryCount', failures, 'originalMessageId', original, 'onlyGroup', group)
  if copy and not is_copyable(copy) then
    put_off(retry, attempts, id, now, delay, failures, '')
  elseif copy and tonumber(delay) > 0 then
    local item = group .. '/' .. id
    redis.call('HSET', items, item, cmsgpack.pack(copy))
    redis.call('ZADD', delayed, now + tonumber(delay), item)
    settle(stream, group, attempts, id)
  elseif copy then
    redis.call('XADD', stream, '*', unpack(copy))
    settle(stream, group, attempts, id)
  elseif is_there then
    gone[#gone + 1] = id
  end
  if copy then requeued = requeued + 1 end
end
-- Last: when memory is full, a call that has something to requeue is refused by its first copy.
for _, id in ipairs(gone) do settle(stream, group, attempts, id) end
return {1, requeued}
