-- Puts an entry into the delayed bucket; the owner of the partition moves it into the stream when it is due.
-- KEYS   delayed, delayed items, dedup, dedup IDs
-- ARGV   offset ms, delay ms, item, message ID or '', window ms, window size, fields...
-- RETURNS {'OK', item} | {'AGAIN', what the first send gave}
-- MEMORY adds: a message more
--#include clock
--#include dedup
local delayed, items, dedup, ids = unpack(KEYS)
local offset, delay, item, message, window, size = unpack(ARGV, 1, 6)
local now = now_ms(offset)
if message ~= '' then
  local first = seen_message(dedup, ids, message, now, window)
  if first then return {'AGAIN', first} end
  note_message(dedup, ids, message, item, now, window, size)
end
redis.call('HSET', items, item, cmsgpack.pack({unpack(ARGV, 7)}))
redis.call('ZADD', delayed, now + tonumber(delay), item)
return {'OK', item}
