-- Who was heard of in a group, and when.
-- KEYS   members, info
-- ARGV   offset ms
-- RETURNS {server ms, member, ms when it was heard of, info, member, ...}
-- MEMORY reads
--#include clock
local reply = {string.format('%.0f', now_ms(ARGV[1]))}
local flat = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for at = 1, #flat, 2 do
  reply[#reply + 1] = flat[at]
  reply[#reply + 1] = flat[at + 1]
  reply[#reply + 1] = redis.call('HGET', KEYS[2], flat[at]) or '{}'
end
return reply
