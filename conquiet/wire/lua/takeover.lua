-- Takes over one page of a group's pending list, in ID order: what an owner before left unfinished, or what this
-- owner was given in an answer that never arrived. Entries of an owner that did not release have a crash counted:
-- each, while they are few; from the third on only the one that it was handling.
-- KEYS   lease, stream, retry, attempts
-- ARGV   owner, epoch, group, from ID, page size, owner that crashed or '', suspect that it was handling or '',
--        crashes that make a suspect
-- RETURNS {0} lost | {1, where the next page begins or '', entries {id, fields, parked until ms or '', record,
--         crashes, '1' if it was another's}, ghosts, last delivered ID of the group on the last page}
-- MEMORY keeps: what is there gets an owner who can finish it
--#include lease
--#include full_memory
--#include pending
--#include rows
--#include bytes
--#include forgetting
local lease, stream, retry, attempts = unpack(KEYS)
local owner, epoch, group, from, size, crashed, running, suspicious = unpack(ARGV)
if not holds(lease, owner, epoch) then return {0} end
go_on_when_full(lease)
-- What whoever reset the group has not come to yet is forgotten, and not taken over.
if redis.call('HEXISTS', lease, 'forget') == 1 and forget_page(lease, stream, group, 1000) then
  return {1, '-', {}, 0, ''}
end

local function count_crash(id, consumer)
  local field = 'c:' .. id
  local crashes = tonumber(redis.call('HGET', attempts, field) or '0')
  if crashed == '' or consumer ~= crashed then return crashes end
  if running ~= '' and id ~= running then return crashes end
  if running == '' and crashes >= tonumber(suspicious) then return crashes end
  return redis.call('HINCRBY', attempts, field, 1)
end

local page = redis.call('XPENDING', stream, group, from, '+', size)
local taken, ghosts, bytes, following = {}, 0, 0, #page == tonumber(size) and '(' .. page[#page][1]
for at, entry in ipairs(page) do
  local id, consumer = entry[1], entry[2]
  if bytes >= most_bytes then
    following = '(' .. page[at - 1][1]
    break
  end
  local fields = fields_of(stream, id)
  bytes = bytes + size_of(fields or {})
  if not fields then
    redis.call('ZREM', retry, id)
    ghosts = ghosts + settle(stream, group, attempts, id)
  else
    local parked = redis.call('ZSCORE', retry, id)
    local crashes = parked and 0 or count_crash(id, consumer)
    if consumer ~= owner then redis.call('XCLAIM', stream, group, owner, 0, id, 'JUSTID') end
    taken[#taken + 1] = {
      id, fields, parked or '', redis.call('HGET', attempts, id) or '', tostring(crashes), consumer ~= owner and '1' or '0'
    }
  end
end
if following then return {1, following, taken, ghosts, ''} end

redis.call('HDEL', lease, 'crashed', 'suspect')
-- The last page: names without pending entries are of owners that are gone.
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local consumer = row(flat)
  if consumer['pending'] == 0 and consumer['name'] ~= owner and string.find(consumer['name'], '#', 1, true) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer['name'])
  end
end
return {1, '', taken, ghosts, group_row(stream, group)['last-delivered-id']}
