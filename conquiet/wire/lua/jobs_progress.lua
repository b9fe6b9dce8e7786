-- Notes how far jobs are that are still held.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   for each job: ID, token as in records, how far from 0 to 1, words
-- RETURNS {1 if noted else 0...}
-- MEMORY keeps: who runs a job goes on
--#include full_memory
--#include jobs_keys
--#include jobs_record
go_on_when_full(jobs)
local ids, replies, texts = {}, {}, {}
for at = 1, #ARGV, 4 do ids[#ids + 1] = ARGV[at] end
local known = values_of(notes, ids)
for at, text in ipairs(leased_records(ids)) do
  local token = text and string.match(text, '^I %- %d+ (%S+) ')
  replies[at] = 0
  if token and token == ARGV[4 * at - 2] then
    replies[at] = 1
    texts[#texts + 1] = ids[at]
    texts[#texts + 1] = string.match(known[at] or '0 0', '^%d+ %d+') .. ' ' .. ARGV[4 * at - 1] .. '\n' .. ARGV[4 * at]
  end
end
in_pieces('HSET', notes, texts)
return replies
