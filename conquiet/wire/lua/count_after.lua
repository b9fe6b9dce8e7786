-- Counts the entries after an ID, up to another; no more than a page at a time, and fewer if they are large.
-- KEYS   stream
-- ARGV   ID before the first, last ID, size of the page, and bytes after which to stop or '' if they do not matter
-- RETURNS {entries, ID of the last one counted or '' if there are no more, bytes of the fields of these entries}
-- MEMORY reads
--#include bytes
local from, until_id, most, budget = unpack(ARGV)
local count, bytes = 0, 0
most, budget = tonumber(most), math.min(most_bytes, tonumber(budget) or most_bytes)
while count < most and bytes < budget do
  local page = redis.call('XRANGE', KEYS[1], '(' .. from, until_id, 'COUNT', next_page(count == 0, most - count))
  if #page == 0 then return {count, '', bytes} end
  for at = 1, #page do
    if bytes >= budget then break end
    from, count, bytes = page[at][1], count + 1, bytes + size_of(page[at][2])
  end
end
return {count, from, bytes}
