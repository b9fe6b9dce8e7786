-- Ends the leases of groups whose topic is deleted; where there was none, none is made.
-- KEYS   leases...
-- ARGV   offset ms
-- RETURNS leases ended
--#include clock
--#include lease
local now, ended = now_ms(ARGV[1]), 0
for _, lease in ipairs(KEYS) do
  if redis.call('EXISTS', lease) == 1 then
    retire(lease, now)
    ended = ended + 1
  end
end
return ended
