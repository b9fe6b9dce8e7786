-- How a group stands on a partition. Messages not delivered yet are counted where that needs no look at them: when it
-- has read nothing or all of what is there, or the server knows, and no removal of an unread entry misled it.
-- KEYS   stream, lease, retry, trim
-- ARGV   offset ms, group
-- RETURNS {server ms, owner or '', epoch, lease until ms, parked, last ID of the stream or '', '1' if the group is
--         there, last delivered ID or '', pending, oldest pending ID or '', messages not delivered or -1}
-- MEMORY reads
--#include clock
--#include rows
--#include bound
local stream, lease, retry, trim = unpack(KEYS)
local held = redis.call('HMGET', lease, 'owner', 'epoch', 'until_ms')
local reply = {
  string.format('%.0f', now_ms(ARGV[1])), held[1] or '', held[2] or '0', held[3] or '0', redis.call('ZCARD', retry)
}
local function tell(...)
  for _, word in ipairs({...}) do reply[#reply + 1] = word end
  return reply
end
if redis.call('EXISTS', stream) == 0 then return tell('', '0', '', 0, '', 0) end

local about, group = row(redis.call('XINFO', 'STREAM', stream)), group_row(stream, ARGV[2])
local first, last = about['first-entry'] or {''}, about['last-entry'] or {''}
if not group then return tell(last[1], '0', '', 0, '', about['length']) end

local function undelivered()
  local delivered = group['last-delivered-id']
  if about['length'] == 0 or not id_below(delivered, last[1]) then return 0 end
  if id_below(delivered, first[1]) then return about['length'] end
  local finished = tonumber(redis.call('HGET', trim, 'removed') or '0')
  local told = type(group['lag']) == 'number' and about['entries-added'] == about['length'] + finished
  return told and group['lag'] or -1
end

local oldest = redis.call('XPENDING', stream, ARGV[2], '-', '+', 1)[1] or {''}
return tell(last[1], '1', group['last-delivered-id'], group['pending'], oldest[1], undelivered())
