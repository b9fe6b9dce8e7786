-- Finds the jobs that certain claims have leased, for a caller that did not get their answers. Changes nothing.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, how many ms these leases still have at least, then the claims' own IDs
-- RETURNS {{ID, token as in records}...}
-- MEMORY reads
--#include clock
--#include jobs_keys
local from, is_wanted, found = now_ms(ARGV[1]) + tonumber(ARGV[2]), {}, {}
for at = 3, #ARGV do is_wanted[ARGV[at]] = true end
-- Only what was claimed or prolonged since then is looked at, and so much of it at most: these are among the first.
local ids = redis.call('ZRANGEBYSCORE', leases, string.format('%d', from), '+inf', 'LIMIT', 0, 10000)
for at, text in ipairs(values_of(records, ids)) do
  local token, claim_id = string.match(text or '', '^I %- %d+ (%d+%.(%S+)) ')
  if claim_id and is_wanted[claim_id] then found[#found + 1] = {ids[at], token} end
end
return found
