-- Fragment: a partition that may hold only so many entries. Needs the fragments full_memory, rows and bound.

-- Makes room for `count` entries to come: removes what all groups have finished, `most` at most. How many are too many
-- still, and how many went. With no group there is no reader who could miss an entry, and `bound` is nil.
local function make_room(stream, trim, limit, count, most, bound, now)
  local over = redis.call('XLEN', stream) + count - limit
  if over <= 0 then return 0, 0 end
  stop_when_full_at(trim, 'removed') -- before it makes room for itself: what comes may be larger than what goes
  local gone = remove_oldest(stream, trim, math.min(over, most), bound or safe_bound(stream, {}), now, {})
  return over - gone, gone
end

-- Removes the oldest entries beyond the limit, `most` at most; how many of them some group had not finished.
local function drop_oldest(stream, trim, limit, most, now)
  local over = redis.call('XLEN', stream) - limit
  if over <= 0 then return 0 end
  local _, lost = remove_oldest(stream, trim, math.min(over, most), nil, now, {})
  return lost
end
