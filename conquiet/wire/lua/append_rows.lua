-- Appends a chunk of rows to a partition once, however often it is sent: as a whole, known by its place in the write,
-- or each row by its ID. A chunk that comes again at the same place with other rows is appended, lest one be lost.
-- KEYS   stream, written, what the batch before has written, trim
-- ARGV   offset ms, place or '' if rows have IDs, digest of the chunk, ms to remember it, ms to remember the batch
--        before or '' to leave that alone, most entries or -1, 'reject' or 'drop' at that or 'grow', timestamp,
--        a digit a row: 1 key + 2 headers + 4 ID, then of each row the payload and those
-- RETURNS {'OK' | 'AGAIN' | 'DIFFERS', rows appended, unfinished entries dropped} | {'FULL', entries}
--#include clock
--#include rows
--#include bound
local stream, written, before, trim = unpack(KEYS)
local offset, place, digest, keep, forget, most, full, timestamp, kinds = unpack(ARGV, 1, 9)
local now, limit, status = now_ms(offset), tonumber(most), 'OK'
local by_id = place == ''
-- What one call clears away at most, beside the room for its own rows. A limit that was lowered is reached step by step.
local room = 500

if forget ~= '' then redis.call('PEXPIRE', before, forget) end
if not by_id then
  local known = redis.call('HGET', written, place)
  if known == digest then return {'AGAIN', 0, 0} end
  if known then status = 'DIFFERS' end
end

-- The rows that are to be appended, as the fields of their entries.
local rows, ids, at = {}, {}, 10
for number = 1, #kinds do
  local kind = string.byte(kinds, number) - 48
  local entry = {'payload', ARGV[at], 'timestamp', timestamp}
  at = at + 1
  if kind % 2 == 1 then
    entry[#entry + 1], entry[#entry + 2] = 'key', ARGV[at]
    at = at + 1
  end
  if kind % 4 >= 2 then
    entry[#entry + 1], entry[#entry + 2] = 'headers', ARGV[at]
    at = at + 1
  end
  if kind >= 4 then
    local id = ARGV[at]
    at = at + 1
    entry[#entry + 1], entry[#entry + 2] = 'messageId', id
    if by_id and (ids[id] or redis.call('SISMEMBER', written, id) == 1) then entry = nil end
    ids[id] = true
  end
  rows[#rows + 1] = entry
end

if limit >= 0 and full == 'reject' and #rows > 0 then
  local over, bound = redis.call('XLEN', stream) + #rows - limit, safe_bound(stream, {})
  if not bound then
    full = 'drop' -- with no group there is nobody who could miss an entry, of these rows neither
  elseif over > 0 then
    over = over - remove_oldest(stream, trim, math.min(over, room + #rows), bound, now, {})
    if over > 0 then return {'FULL', redis.call('XLEN', stream)} end
  end
end
for _, entry in ipairs(rows) do redis.call('XADD', stream, '*', unpack(entry)) end
local dropped = 0
if limit >= 0 and full == 'drop' then
  local over = redis.call('XLEN', stream) - limit
  if over > 0 then
    local _, lost = remove_oldest(stream, trim, math.min(over, room + #rows), nil, now, {})
    dropped = lost
  end
end
if by_id then
  for id in pairs(ids) do redis.call('SADD', written, id) end
else
  redis.call('HSET', written, place, digest)
end
redis.call('PEXPIRE', written, keep)
return {status, #rows, dropped}
