-- Ends the leases of groups whose topic is deleted; where there was none, none is made.
-- KEYS   leases...
-- ARGV   offset ms
-- RETURNS leases ended
-- MEMORY frees: of each lease only the epoch stays, for a day
--#include clock
--#include full_memory
--#include lease
local now, ended = now_ms(ARGV[1]), 0
for _, lease in ipairs(KEYS) do
  if redis.call('EXISTS', lease) == 1 then
    go_on_when_full(lease)
    retire(lease, now)
    ended = ended + 1
  end
end
return ended
