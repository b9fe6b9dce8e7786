-- Fragment: how far a stream may be trimmed, and trimming it. Needs the fragment rows.

-- IDs are compared and counted up as digits: a sequence number has 64 bits, a number of Lua only 53.
local function digits_below(one, other)
  if #one ~= #other then return #one < #other end
  return one < other
end

-- Whether an entry ID comes before another.
local function id_below(one, other)
  local ms, seq = string.match(one, '^(%d+)-(%d+)$')
  local other_ms, other_seq = string.match(other, '^(%d+)-(%d+)$')
  if ms ~= other_ms then return digits_below(ms, other_ms) end
  return digits_below(seq, other_seq)
end

local function plus_one(digits)
  local head, nines = string.match(digits, '^(%d-)(9*)$')
  local zeros = string.rep('0', #nines)
  if head == '' then return '1' .. zeros end
  return string.sub(head, 1, -2) .. string.char(string.byte(head, -1) + 1) .. zeros
end

-- The ID that comes next after an ID.
local function id_after(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq == '18446744073709551615' then return plus_one(ms) .. '-0' end
  return ms .. '-' .. plus_one(seq)
end

-- The first ID that some group has not finished: the lowest of each group's oldest pending and next undelivered one.
-- nil if there is no group. Groups in `ignored` do not count.
local function safe_bound(stream, ignored)
  local bound = nil
  if redis.call('EXISTS', stream) == 0 then return nil end
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local group = row(flat)
    if not ignored[group['name']] then
      local oldest = redis.call('XPENDING', stream, group['name'], '-', '+', 1)[1]
      local open = id_after(group['last-delivered-id'])
      if oldest and id_below(oldest[1], open) then open = oldest[1] end
      if not bound or id_below(open, bound) then bound = open end
    end
  end
  return bound
end

-- The IDs of the oldest entries, those before `bound` if there is one. In small pages, since the entries come along, and
-- fewer than asked for if they are large: then the second value is true.
local function oldest_ids(stream, bound, most)
  local ids, from, to, bytes = {}, '-', bound and '(' .. bound or '+', 0
  while #ids < most and bytes < 8388608 do
    local page = redis.call('XRANGE', stream, from, to, 'COUNT', math.min(most - #ids, #ids == 0 and 4 or 24))
    if #page == 0 then return ids, false end
    for _, entry in ipairs(page) do
      ids[#ids + 1] = entry[1]
      for _, word in ipairs(entry[2]) do bytes = bytes + #word end
    end
    from = '(' .. ids[#ids]
  end
  return ids, #ids < most
end

-- How many of the entries (in order) some group has not finished.
local function unfinished(stream, ids, ignored)
  local open, count = {}, 0
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local group = row(flat)
    if not ignored[group['name']] then
      for _, entry in ipairs(redis.call('XPENDING', stream, group['name'], ids[1], ids[#ids], #ids)) do
        open[entry[1]] = true
      end
      for at = #ids, 1, -1 do
        if not id_below(group['last-delivered-id'], ids[at]) then break end
        open[ids[at]] = true
      end
    end
  end
  for _, id in ipairs(ids) do
    if open[id] then count = count + 1 end
  end
  return count
end

-- Notes that entries were removed, all those before `below`. Of those that no group misses the number is kept: as
-- long as it accounts for every entry that is gone, the server's own count of what a group has not read is right.
local function note_removed(trim, below, now, finished)
  local bound = redis.call('HGET', trim, 'bound')
  if not bound or id_below(bound, below) then redis.call('HSET', trim, 'bound', below) end
  redis.call('HSET', trim, 'at_ms', string.format('%.0f', now))
  if finished > 0 then redis.call('HINCRBY', trim, 'removed', finished) end
end

-- Removes the oldest entries: those before `bound`, or with no bound any, of which the unfinished are counted. How many,
-- how many of them were unfinished, and whether there may be more that only another call removes.
local function remove_oldest(stream, trim, most, bound, now, ignored)
  local ids, more = oldest_ids(stream, bound, most)
  if #ids == 0 then return 0, 0, false end
  local dropped = bound and 0 or unfinished(stream, ids, ignored)
  local below = id_after(ids[#ids])
  redis.call('XTRIM', stream, 'MINID', below)
  if dropped > 0 then redis.call('HINCRBY', trim, 'dropped', dropped) end
  note_removed(trim, below, now, next(ignored) and 0 or #ids - dropped)
  return #ids, dropped, more
end
