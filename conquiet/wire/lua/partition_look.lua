-- What there is to know of a partition, and its groups.
-- KEYS   stream, delayed, trim
-- ARGV   none
-- RETURNS {entries, first ID or '', last ID or '', last ID ever given, delayed, trimmed below or '', dropped,
--         list of groups, list of groups that were deleted and left a lease for good, as an earlier version did}
-- MEMORY reads
--#include rows
local stream, delayed, trim = unpack(KEYS)
local groups, gone, first, last, given = {}, {}, '', '', '0-0'
local length = redis.call('XLEN', stream)
if redis.call('EXISTS', stream) == 1 then
  local about = row(redis.call('XINFO', 'STREAM', stream))
  given = about['last-generated-id']
  first = about['first-entry'] and about['first-entry'][1] or ''
  last = about['last-entry'] and about['last-entry'][1] or ''
  for at, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do groups[at] = row(flat)['name'] end
end
for _, field in ipairs(redis.call('HKEYS', trim)) do
  local group = string.match(field, '^gone:(.*)$')
  if group then gone[#gone + 1] = group end
end
local trimmed = redis.call('HMGET', trim, 'bound', 'dropped')
return {
  length, first, last, given, redis.call('ZCARD', delayed), trimmed[1] or '', trimmed[2] or '0', groups, gone
}
