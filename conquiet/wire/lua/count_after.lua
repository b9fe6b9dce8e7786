-- Counts the entries after an ID, up to another; no more than a page at a time.
-- KEYS   stream
-- ARGV   ID before the first, last ID, size of the page
-- RETURNS {entries, ID of the last one counted or '' if there are no more}
local from, count, most = ARGV[1], 0, tonumber(ARGV[3])
while count < most do
  local page = redis.call('XRANGE', KEYS[1], '(' .. from, ARGV[2], 'COUNT', math.min(most - count, 50))
  if #page == 0 then return {count, ''} end
  count = count + #page
  from = page[#page][1]
end
return {count, from}
