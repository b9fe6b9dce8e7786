-- Prolongs leases that are still held.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, ttl ms, then for each lease: ID, token as in records
-- RETURNS {1 if prolonged else 0...}
-- MEMORY keeps: who runs a job goes on
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
go_on_when_full(jobs)
local until_ms = now_ms(ARGV[1]) + tonumber(ARGV[2])
local ids, replies, leased = {}, {}, {}
for at = 3, #ARGV, 2 do ids[#ids + 1] = ARGV[at] end
for at, text in ipairs(leased_records(ids)) do
  local token = text and string.match(text, '^I %- %d+ (%S+) ')
  replies[at] = 0
  if token and token == ARGV[2 + 2 * at] then
    replies[at] = 1
    leased[#leased + 1] = until_ms
    leased[#leased + 1] = ids[at]
  end
end
in_pieces('ZADD', leases, leased)
return replies
