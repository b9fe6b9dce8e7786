-- Moves failed entries, raw and with the record of their failure, to the outbox of dead letters, and acknowledges
-- them. An entry that is not pending any more was buried before and is left alone.
-- KEYS   lease, stream, retry, attempts, outbox
-- ARGV   owner, epoch, offset ms, group, topic, partition, then for each entry: ID, failures, reason, error type, error,
--        traceback, number of words that replace its fields or -1 to keep them, these words...
-- RETURNS {0} lost | {1, entries buried}
-- MEMORY adds: a letter of each entry, which stays pending until there is room for it
--#include clock
--#include lease
--#include pending
local lease, stream, retry, attempts, outbox = unpack(KEYS)
local owner, epoch, offset, group, topic, partition = unpack(ARGV, 1, 6)
if not holds(lease, owner, epoch) then return {0} end
local now, buried = string.format('%.0f', now_ms(offset)), 0

local function letter(id, failures, reason, kind, message, trace, fields)
  local first = string.match(redis.call('HGET', attempts, id) or '', '^%d+|(%d*)|')
  if not first or first == '' then first = now end
  local words = {
    'originalTopic', topic, 'partitionId', partition, 'group', group, 'originalMessageId', id, 'attempts', failures,
    'reason', reason, 'errorType', kind, 'error', message, 'traceback', trace, 'firstFailedAt', first, 'failedAt', now,
    'consumer', owner, 'crashes', redis.call('HGET', attempts, 'c:' .. id) or '0', 'fields', #fields / 2,
  }
  for _, word in ipairs(fields) do words[#words + 1] = word end
  return words
end

local at, gone = 7, {}
while at <= #ARGV do
  local id, failures, reason, kind, message, trace, replaced = unpack(ARGV, at, at + 6)
  local words = math.max(tonumber(replaced), 0)
  if is_pending(stream, group, id) then
    local fields = fields_of(stream, id)
    if fields and tonumber(replaced) >= 0 then
      fields = {}
      for word = at + 7, at + 6 + words do fields[#fields + 1] = ARGV[word] end
    end
    if fields then
      -- A letter that no script can carry names the entry, which stays in the stream.
      if not is_copyable(fields) then fields = {} end
      redis.call('XADD', outbox, '*', unpack(letter(id, failures, reason, kind, message, trace, fields)))
      buried = buried + 1
      redis.call('ZREM', retry, id)
      settle(stream, group, attempts, id)
    else
      gone[#gone + 1] = id
    end
  end
  at = at + 7 + words
end
-- Last: when memory is full, a call that has something to bury is refused by its first letter.
for _, id in ipairs(gone) do
  redis.call('ZREM', retry, id)
  settle(stream, group, attempts, id)
end
return {1, buried}
