-- Registers a replay with a partition, before it reads the dead letters. Until it ends, or is given up because nothing
-- was heard of it, no mark of a letter that was replayed is removed: so no replay can do again what another has done.
-- KEYS   replayed
-- ARGV   offset ms, run, ms after which a run is given up, most letters to return
-- RETURNS letters that are marked as replayed, and that nobody is known to have removed
-- MEMORY adds: a run, and then messages to be handled
--#include clock
local now = now_ms(ARGV[1])
local flat, marked = redis.call('HGETALL', KEYS[1]), {}
redis.call('HSET', KEYS[1], 'run:' .. ARGV[2], string.format('%.0f', now)) -- first: when memory is full, it is refused
for at = 1, #flat, 2 do
  if string.sub(flat[at], 1, 4) ~= 'run:' then
    if #marked < tonumber(ARGV[4]) then marked[#marked + 1] = flat[at] end
  elseif tonumber(flat[at + 1]) < now - tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[1], flat[at])
  end
end
return marked
