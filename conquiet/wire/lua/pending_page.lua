-- A page of a group's pending list, with what is known of each entry's failures.
-- KEYS   stream, retry, attempts
-- ARGV   group, from ID, size of the page
-- RETURNS {{ID, consumer, idle ms, deliveries, parked until ms or '', record or '', crashes}...}
-- MEMORY reads
--#include rows
local stream, retry, attempts = unpack(KEYS)
local group, from, size = unpack(ARGV)
local page = {}
if redis.call('EXISTS', stream) == 0 or not group_row(stream, group) then return page end
for at, entry in ipairs(redis.call('XPENDING', stream, group, from, '+', size)) do
  local id = entry[1]
  local known = redis.call('HMGET', attempts, id, 'c:' .. id)
  page[at] = {
    id, entry[2], entry[3], entry[4], redis.call('ZSCORE', retry, id) or '', known[1] or '', known[2] or '0'
  }
end
return page
