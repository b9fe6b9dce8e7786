-- Appends a chunk of rows to a partition once, however often it is sent: as a whole, known by its place in the write,
-- or each row by its ID. A chunk that comes again at the same place with other rows is appended, lest one be lost.
-- KEYS   stream, written, what the batch before has written, trim
-- ARGV   offset ms, place or '' if rows have IDs, digest of the chunk, ms to remember it, ms to remember the batch
--        before or '' to leave that alone, most entries or -1, 'reject' or 'drop' at that or 'grow', timestamp,
--        a digit a row (entry), then the values of all rows in one MessagePack array
-- RETURNS {'OK' | 'AGAIN' | 'DIFFERS', rows appended, unfinished entries dropped}
--         | {'FULL', entries, entries that were removed; if any, another call may remove more}
-- MEMORY adds: messages more
--#include clock
--#include full_memory
--#include rows
--#include bound
--#include room
--#include entry
local stream, written, before, trim = unpack(KEYS)
local offset, place, digest, keep, forget, most, full, timestamp, kinds, packed = unpack(ARGV)
local now, limit, status = now_ms(offset), tonumber(most), 'OK'
local by_id = place == ''
-- What one call clears away at most, beside the room for its own rows. A limit that was lowered is reached step by step.
local room = 500

-- Only after something was appended: else it would be the first write, and rows would go on into a full memory.
local function forget_before()
  if forget ~= '' then redis.call('PEXPIRE', before, forget) end
end

if not by_id then
  local known = redis.call('HGET', written, place)
  if known == digest then
    forget_before()
    return {'AGAIN', 0, 0}
  end
  if known then status = 'DIFFERS' end
end

local values = cmsgpack.unpack(packed)

-- The numbers of the rows whose IDs are there already, and how many are not.
local known, ids, count = {}, {}, #kinds
if by_id then
  local at = 0
  for number = 1, #kinds do
    at = at + row_widths[string.byte(kinds, number) - 48]
    local id = values[at]
    if ids[id] or redis.call('SISMEMBER', written, id) == 1 then
      known[number] = true
      count = count - 1
    end
    ids[id] = true
  end
end

local function append_all()
  local at = 1
  for number = 1, #kinds do
    local kind = string.byte(kinds, number) - 48
    -- Those that are known were appended by an earlier try, or by this one.
    if not known[number] then append_row(stream, timestamp, kind, values, at) end
    at = at + row_widths[kind]
  end
end

if limit >= 0 and full == 'reject' and count > 0 then
  local bound = safe_bound(stream, {})
  if bound then
    local over, gone = make_room(stream, trim, limit, count, room + count, bound, now)
    if over > 0 then return {'FULL', redis.call('XLEN', stream), gone} end
  else
    full = 'drop' -- with no group there is no reader who could miss an entry, of these rows neither
  end
end
append_all()
local dropped = 0
if limit >= 0 and full == 'drop' then dropped = drop_oldest(stream, trim, limit, room + count, now) end
if by_id then
  for id in pairs(ids) do redis.call('SADD', written, id) end
else
  redis.call('HSET', written, place, digest)
end
redis.call('PEXPIRE', written, keep)
forget_before()
return {status, count, dropped}
