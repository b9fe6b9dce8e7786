-- Removes what a partition need not keep: by age, by number and what all groups have finished; never what some group
-- has not finished, unless it may drop that to keep the number. Works in runs of a bounded size.
-- KEYS   stream, trim, then the lease of each group named
-- ARGV   offset ms, most entries or -1, most age ms or -1, 'acked' or '', 'drop' or '', group expiry ms or -1,
--        size of a run, then each group that has a lease among the keys
-- RETURNS {entries removed, of them unfinished, 1 if another run is needed | 0, bound or '', expired groups...}
-- MEMORY frees: messages
--#include clock
--#include full_memory
--#include rows
--#include bound
local stream, trim = KEYS[1], KEYS[2]
local offset, most, age, acked, drop, expiry, size = unpack(ARGV, 1, 7)
local now, limit, run = now_ms(offset), tonumber(most), tonumber(size)
local removed, dropped = 0, 0

-- The groups that nobody has served for too long. Who serves a group holds its lease, or moves it on: when that was
-- seen last is noted, since neither a lease that was given up nor a foreign reader tells.
local function expired_groups()
  local expired, leases = {}, {}
  for at = 8, #ARGV do leases[ARGV[at]] = KEYS[at - 5] end
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local group = row(flat)
    local field = 'seen:' .. group['name']
    local ms, place = string.match(redis.call('HGET', trim, field) or '', '^(%d+)|(.*)$')
    local held = leases[group['name']] and redis.call('HGET', leases[group['name']], 'until_ms')
    local seen = math.max(tonumber(ms) or 0, tonumber(held or 0))
    if place ~= group['last-delivered-id'] then seen = math.max(seen, now) end
    redis.call('HSET', trim, field, string.format('%.0f', seen) .. '|' .. group['last-delivered-id'])
    if seen < now - tonumber(expiry) then expired[#expired + 1] = group['name'] end
  end
  return expired
end

local function answer(more, expired)
  return {removed, dropped, more and 1 or 0, redis.call('HGET', trim, 'bound') or '', unpack(expired)}
end

if redis.call('EXISTS', stream) == 0 then return answer(false, {}) end
go_on_when_full(trim)
local expired, ignored = tonumber(expiry) >= 0 and expired_groups() or {}, {}
for _, group in ipairs(expired) do ignored[group] = true end
local bound = safe_bound(stream, ignored)

-- Removes up to `count` entries before `below` in whole nodes of the stream, which costs next to nothing.
local function remove_nodes(below, last, count)
  local gone = redis.call('XTRIM', stream, 'MINID', '~', below, 'LIMIT', count)
  if gone == 0 then return 0 end
  local head = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  local cut = id_after(last)
  note_removed(trim, head and id_below(head[1], cut) and head[1] or cut, now, next(ignored) and 0 or gone)
  return gone
end

local function last_before(below)
  local last = redis.call('XREVRANGE', stream, '(' .. below, '-', 'COUNT', 1)[1]
  return last and last[1]
end

-- By age, and what is finished: all before one ID.
local cut = acked ~= '' and bound or nil
local since = tonumber(age) >= 0 and now - tonumber(age) or 0
if since > 0 then
  local by_age = string.format('%.0f', since) .. '-0'
  if bound and id_below(bound, by_age) then by_age = bound end
  if not cut or id_below(cut, by_age) then cut = by_age end
end
local last = cut and last_before(cut)
if last then
  removed = remove_nodes(cut, last, run)
  if removed > 0 then return answer(true, expired) end
  removed = redis.call('XTRIM', stream, 'MINID', cut)
  note_removed(trim, id_after(last), now, next(ignored) and 0 or removed)
end

-- By number: whole nodes first, then the rest one by one.
local over = limit >= 0 and redis.call('XLEN', stream) - limit or 0
if over > 1 then
  local tail = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1][1]
  local below = bound or tail
  last = last_before(below)
  -- One less than are too many: the last one is looked at, so that the bound is exact.
  local gone = last and remove_nodes(below, last, math.min(over - 1, run)) or 0
  removed = removed + gone
  if gone > 0 then return answer(true, expired) end
end
if over > 0 then
  local count = math.min(over, run)
  local gone, _, more = remove_oldest(stream, trim, count, bound, now, ignored)
  removed, over = removed + gone, over - gone
  if gone == count or more then return answer(over > 0, expired) end
end

-- What is left is unfinished.
if over > 0 and drop ~= '' then
  local count = math.min(over, run)
  local gone, lost = remove_oldest(stream, trim, count, nil, now, ignored)
  removed, dropped = removed + gone, lost
  return answer(over > gone, expired)
end
return answer(false, expired)
