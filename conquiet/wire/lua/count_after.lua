-- Counts the entries after an ID, up to another; no more than a page at a time, and fewer if they are large.
-- KEYS   stream
-- ARGV   ID before the first, last ID, size of the page
-- RETURNS {entries, ID of the last one counted or '' if there are no more}
-- MEMORY reads
--#include bytes
local from, count, most, bytes = ARGV[1], 0, tonumber(ARGV[3]), 0
while count < most and bytes < most_bytes do
  local page = redis.call('XRANGE', KEYS[1], '(' .. from, ARGV[2], 'COUNT', next_page(count == 0, most - count))
  if #page == 0 then return {count, ''} end
  count = count + #page
  from = page[#page][1]
  for at = 1, #page do bytes = bytes + size_of(page[at][2]) end
end
return {count, from}
