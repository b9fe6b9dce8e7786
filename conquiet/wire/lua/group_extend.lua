-- Puts groups on a partition that a topic is about to get, at its beginning, so that nothing is written there without
-- them. One whose lease says that it was deleted from there in the middle of the growth is not brought back; a deletion
-- of before was of another life: of the group, or of a whole topic that had this partition.
-- KEYS   stream, then the lease of each group
-- ARGV   server ms when the growth was announced, then each group
-- RETURNS groups that were put there | -1 the key is no stream, and nothing will ever be written there
-- MEMORY keeps: until a growth is completed, no group takes what could make room
--#include full_memory
--#include rows
local stream, announced, there, put = KEYS[1], tonumber(ARGV[1]), {}, 0
local kind = redis.call('TYPE', stream)['ok']
if kind ~= 'none' and kind ~= 'stream' then return -1 end
if kind == 'stream' then
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do there[row(flat)['name']] = true end
end
go_on_when_full(stream)
for at = 2, #ARGV do
  local group, deleted = ARGV[at], tonumber(redis.call('HGET', KEYS[at], 'deleted_ms') or 0)
  if not there[group] and deleted < announced then
    redis.call('XGROUP', 'CREATE', stream, group, '0-0', 'MKSTREAM')
    put = put + 1
  end
end
return put
