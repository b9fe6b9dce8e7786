-- Acknowledges what was handled, then takes what there is to do: parked entries that are due, and new ones.
-- KEYS   lease, stream, retry, attempts, delayed, delayed items
-- ARGV   owner, epoch, offset ms, group, most new entries, most due entries, last ID taken, ID up to which new entries
--        are taken or '' (then perhaps '|' and the ID of one whose fields the owner has), IDs to acknowledge...
-- RETURNS {0} lost | {1, acknowledged, new entries, due entries {id, fields, record, crashes}, ms until the next is
--         due or -1, ghosts (parked IDs whose entry is gone), 1 if new entries were left because they are large | 0}
-- MEMORY keeps: what is handled and acknowledged can be removed
--#include clock
--#include lease
--#include full_memory
--#include pending
--#include bytes
local lease, stream, retry, attempts, delayed, items = unpack(KEYS)
local owner, epoch, offset, group, most, most_due, last, limit = unpack(ARGV, 1, 8)
if not holds(lease, owner, epoch) then return {0} end
go_on_when_full(lease)
local known
limit, known = string.match(limit, '^([^|]*)|?(.*)$')

local acknowledged = 0
local recorded = #ARGV > 8 and redis.call('EXISTS', attempts) == 1
for from = 9, #ARGV, 1000 do
  local to = math.min(from + 999, #ARGV)
  acknowledged = acknowledged + redis.call('XACK', stream, group, unpack(ARGV, from, to))
  if recorded then
    redis.call('HDEL', attempts, unpack(ARGV, from, to))
    for at = from, to do redis.call('HDEL', attempts, 'c:' .. ARGV[at]) end
  end
end
if #ARGV > 8 then
  -- Everything below the first pending entry is done; with none, all that was taken is.
  local first = redis.call('XPENDING', stream, group, '-', '+', 1)[1]
  if not first then
    redis.call('HSET', lease, 'resume', last)
  else
    local ms, seq = string.match(first[1], '^(%d+)-(%d+)$')
    local below = seq ~= '0' and ms .. '-' .. string.format('%.0f', tonumber(seq) - 1)
    if ms ~= '0' and not below then below = string.format('%.0f', tonumber(ms) - 1) .. '-18446744073709551615' end
    redis.call('HSET', lease, 'resume', below or '0-0')
  end
end

local next_due, now = -1, nil
local function head_of(set)
  local head = redis.call('ZRANGE', set, 0, 0, 'WITHSCORES')
  if not head[1] then return nil end
  now = now or now_ms(offset)
  return tonumber(head[2]) - now
end
local function note(wait)
  if wait and (next_due < 0 or wait < next_due) then next_due = math.max(wait, 0) end
end

local wait = head_of(delayed)
if wait and wait <= 0 then
  local moved = 0
  for _, item in ipairs(redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, 100)) do
    if moved >= most_bytes then break end
    local packed = redis.call('HGET', items, item)
    moved = moved + #(packed or '')
    local words = packed and cmsgpack.unpack(packed)
    -- Of one that no script can append, its last words are: they name the entry that it is a copy of.
    if words then redis.call('XADD', stream, '*', unpack(words, is_copyable(words) and 1 or #words - 5)) end
    redis.call('ZREM', delayed, item)
    redis.call('HDEL', items, item)
  end
  wait = head_of(delayed)
end
note(wait)

local due, ghosts, bytes = {}, 0, 0
wait = head_of(retry)
if wait and wait <= 0 and tonumber(most_due) > 0 then
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', retry, '-inf', now, 'LIMIT', 0, most_due)) do
    if bytes >= most_bytes then break end
    redis.call('ZREM', retry, id)
    local fields = fields_of(stream, id)
    bytes = bytes + size_of(fields or {})
    if not fields then
      ghosts = ghosts + settle(stream, group, attempts, id)
    elseif #redis.call('XCLAIM', stream, group, owner, 0, id, 'JUSTID') > 0 then
      due[#due + 1] = {id, fields, redis.call('HGET', attempts, id) or '', redis.call('HGET', attempts, 'c:' .. id) or '0'}
    else
      redis.call('HDEL', attempts, id, 'c:' .. id)
    end
  end
  wait = head_of(retry)
end
note(wait)

local fresh, open = {}, tonumber(most)
while open > 0 and bytes < most_bytes do
  local size = next_page(#fresh == 0, open)
  if limit ~= '' then size = #redis.call('XRANGE', stream, '(' .. last, limit, 'COUNT', size) end
  local page = size > 0 and redis.call('XREADGROUP', 'GROUP', group, owner, 'COUNT', size, 'STREAMS', stream, '>')
  page = page and page[1][2] or {}
  for at = 1, #page do
    fresh[#fresh + 1] = page[at]
    bytes = bytes + size_of(page[at][2])
    if page[at][1] == known then page[at][2] = {} end
  end
  -- A page that is not full is the last.
  open = #page > 0 and #page == size and open - #page or 0
  last = #page > 0 and page[#page][1] or last
end
return {1, acknowledged, fresh, due, next_due, ghosts, open > 0 and 1 or 0}
