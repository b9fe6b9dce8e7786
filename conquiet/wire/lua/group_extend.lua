-- Puts groups on a partition that a topic is about to get, at its beginning, so that nothing is written there without
-- them. One whose lease says that it was deleted from there, in the middle of the growth, is not brought back.
-- KEYS   stream, then the lease of each group
-- ARGV   each group
-- RETURNS groups that were put there
--#include rows
local stream, there, put = KEYS[1], {}, 0
if redis.call('EXISTS', stream) == 1 then
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do there[row(flat)['name']] = true end
end
for at, group in ipairs(ARGV) do
  if not there[group] and redis.call('HEXISTS', KEYS[at + 1], 'deleted_ms') == 0 then
    redis.call('XGROUP', 'CREATE', stream, group, '0-0', 'MKSTREAM')
    put = put + 1
  end
end
return put
