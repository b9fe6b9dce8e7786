-- How far a partition reaches, all at one moment.
-- KEYS   stream, trim
-- ARGV   none
-- RETURNS {last ID ever given, first ID or '', entries, entries ever added or -1 (before 7.0), trimmed below or ''}
-- MEMORY reads
--#include rows
local stream, trim = unpack(KEYS)
local bound = redis.call('HGET', trim, 'bound') or ''
if redis.call('EXISTS', stream) == 0 then return {'0-0', '', 0, 0, bound} end
local about = row(redis.call('XINFO', 'STREAM', stream))
local first = about['first-entry']
return {about['last-generated-id'], first and first[1] or '', about['length'], about['entries-added'] or -1, bound}
