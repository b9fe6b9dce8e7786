-- Ends a replay on a partition. Marks of letters that have left the dead letters go when no replay is left that may
-- still have one of them at hand.
-- KEYS   replayed
-- ARGV   run, letters that were removed...
-- RETURNS 1
local replayed, others, done = KEYS[1], false, {}
redis.call('HDEL', replayed, 'run:' .. ARGV[1])
for at = 2, #ARGV do redis.call('HSET', replayed, ARGV[at], 'done') end
local flat = redis.call('HGETALL', replayed)
for at = 1, #flat, 2 do
  others = others or string.sub(flat[at], 1, 4) == 'run:'
  if flat[at + 1] == 'done' then done[#done + 1] = flat[at] end
end
if others then return 1 end
for _, letter in ipairs(done) do redis.call('HDEL', replayed, letter) end
return 1
