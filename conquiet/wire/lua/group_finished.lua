-- Whether a group has finished a partition up to an ID: all of it was delivered, and nothing is pending, apart from
-- messages that wait for another attempt where these do not count.
-- KEYS   stream, retry
-- ARGV   group, ID, '1' if what waits for another attempt counts or '', ID from which to look at what is pending, page
-- RETURNS '' it has | ID from which to look the next time
-- MEMORY reads
--#include rows
local stream, retry = unpack(KEYS)
local group, last, strict, from, page = unpack(ARGV)
local there = redis.call('EXISTS', stream) == 1 and group_row(stream, group)
if not there then return from end
local pending = redis.call('XPENDING', stream, group, from, last, page)
for _, entry in ipairs(pending) do
  if strict == '1' or not redis.call('ZSCORE', retry, entry[1]) then return entry[1] end
end
if #pending == tonumber(page) then return '(' .. pending[#pending][1] end
if #redis.call('XRANGE', stream, '(' .. there['last-delivered-id'], last, 'COUNT', 1) > 0 then return from end
return ''
