-- Acknowledges failed entries and puts a copy of each, addressed to the same group, back behind the others: at once
-- or, through the delayed bucket, later.
-- KEYS   lease, stream, attempts, delayed, delayed items
-- ARGV   owner, epoch, offset ms, group, then for each entry: ID, delay ms, failures so far, first entry "partition/ID"
-- RETURNS {0} lost | {1, entries requeued}
--#include clock
--#include lease
--#include pending
local lease, stream, attempts, delayed, items = unpack(KEYS)
local owner, epoch, offset, group = unpack(ARGV, 1, 4)
if not holds(lease, owner, epoch) then return {0} end
local replaced = {retryCount = true, originalMessageId = true, onlyGroup = true}
local now, requeued = now_ms(offset), 0
for at = 5, #ARGV, 4 do
  local id, delay, failures, original = unpack(ARGV, at, at + 3)
  local fields = is_pending(stream, group, id) and fields_of(stream, id)
  if fields then
    local copy = {}
    for field = 1, #fields, 2 do
      if not replaced[fields[field]] then
        copy[#copy + 1] = fields[field]
        copy[#copy + 1] = fields[field + 1]
      end
    end
    for _, word in ipairs({'retryCount', failures, 'originalMessageId', original, 'onlyGroup', group}) do
      copy[#copy + 1] = word
    end
    if tonumber(delay) > 0 then
      local item = group .. '/' .. id
      redis.call('HSET', items, item, cmsgpack.pack(copy))
      redis.call('ZADD', delayed, now + tonumber(delay), item)
    else
      redis.call('XADD', stream, '*', unpack(copy))
    end
    settle(stream, group, attempts, id)
    requeued = requeued + 1
  end
end
return {1, requeued}
