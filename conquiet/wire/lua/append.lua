-- Appends an entry under rules that a plain XADD cannot keep: one message ID once, and no more than a topic holds.
-- KEYS   stream, dedup, dedup IDs, trim
-- ARGV   offset ms, message ID or '', window ms, window size, most entries or -1, 'reject' or 'drop' at that, fields...
-- RETURNS {'OK', entry ID, unfinished entries dropped} | {'AGAIN', entry ID of the first time} | {'FULL', entries}
-- MEMORY adds: a message more
--#include clock
--#include full_memory
--#include dedup
--#include rows
--#include bound
--#include room
local stream, dedup, ids, trim = unpack(KEYS)
local offset, message, window, size, most, full = unpack(ARGV, 1, 6)
local now = now_ms(offset)
-- What one call clears away at most. A limit that was lowered is reached step by step, by this and by trimming.
local room = 100

if message ~= '' then
  local first = seen_message(dedup, ids, message, now, window)
  if first then return {'AGAIN', first} end
end

local limit = tonumber(most)
if limit >= 0 and full == 'reject' then
  local over = make_room(stream, trim, limit, 1, room, nil, now)
  if over > 0 then return {'FULL', redis.call('XLEN', stream)} end
end

local id, dropped = redis.call('XADD', stream, '*', unpack(ARGV, 7)), 0
if limit >= 0 and full == 'drop' then dropped = drop_oldest(stream, trim, limit, room, now) end
if message ~= '' then
  note_message(dedup, ids, message, id, now, window, size)
end
return {'OK', id, dropped}
