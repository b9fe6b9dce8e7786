-- Fragment: who has waited longest, whatever the priority. Needs the fragment jobs_keys.
-- The key `waits` has each priority that is in line, by a moment no later than that since which its first job waits. What
-- leaves the line changes nothing there: a look that finds a moment too early corrects it. A member "+" and a priority, or
-- "+" alone, says that the priorities after that one are yet to be found, in a line that an older version has filled.

local waits_since = {}

-- That a job of this priority gets in line which waits since then.
local function note_wait(priority, since)
  waits_since[priority] = math.min(since, waits_since[priority] or since)
end

-- Writes what was noted; to be called before the jobs are in line.
local function write_waits()
  local words = {}
  for priority, since in pairs(waits_since) do
    words[#words + 1] = string.format('%d', since)
    words[#words + 1] = priority
  end
  if #words == 0 then return end
  if redis.call('EXISTS', waits) == 0 and redis.call('EXISTS', ready) == 1 then redis.call('ZADD', waits, -1, '+') end
  for from = 1, #words, 4000 do
    redis.call('ZADD', waits, 'LT', unpack(words, from, math.min(from + 3999, #words)))
  end
  waits_since = {}
end

local function since_of(place)
  return tonumber(string.sub(place, 11, 25))
end

-- Finds some of the priorities in line that come after a mark.
local function explore(mark)
  redis.call('ZREM', waits, mark)
  local after = string.sub(mark, 2)
  for _ = 1, 100 do
    local place = redis.call('ZRANGEBYLEX', ready, after == '' and '-' or '(' .. after .. ':', '+', 'LIMIT', 0, 1)[1]
    if not place then return end
    after = string.sub(place, 1, 10)
    redis.call('ZADD', waits, 'LT', since_of(place), after)
  end
  redis.call('ZADD', waits, -1, '+' .. after)
end

-- How many of the places, which are of one priority, come before any of the next priority, waiting since then.
local function earlier(places, next_priority, next_since)
  if not next_priority then return #places end
  local priority = string.sub(places[1], 1, 10)
  for at, place in ipairs(places) do
    local since = since_of(place)
    if since > next_since or since == next_since and priority > next_priority then return at - 1 end
  end
  return #places
end

-- Up to so many places in line, of those that have waited longest, that are not in `is_taken`, and puts them there.
-- None if there is but one priority: they are those in front.
local function longest_waiting(most, is_taken)
  local found, after = {}, {}
  -- A line that an older version filled, and that no claim has looked at since.
  if redis.call('EXISTS', waits) == 0 then explore('+') end
  for _ = 1, 200 + 2 * most do
    local top = redis.call('ZRANGE', waits, 0, 1, 'WITHSCORES')
    local priority = top[1]
    if #found >= most or not priority then return found end
    if string.sub(priority, 1, 1) == '+' then
      explore(priority)
    elseif not top[3] and #found == 0 then
      return found
    else
      local from = after[priority] and '(' .. after[priority] or '[' .. priority
      local places = redis.call('ZRANGEBYLEX', ready, from, '(' .. priority .. ':', 'LIMIT', 0, most)
      if #places == 0 then
        redis.call('ZREM', waits, priority)
      else
        local last = since_of(places[1]) <= tonumber(top[2]) and earlier(places, top[3], tonumber(top[4])) or 0
        local at = 0
        while at < last and #found < most do
          at = at + 1
          if not is_taken[places[at]] then
            is_taken[places[at]] = true
            found[#found + 1] = places[at]
          end
        end
        after[priority] = places[at] or after[priority]
        redis.call('ZADD', waits, since_of(places[math.min(at + 1, #places)]), priority)
      end
    end
  end
  return found
end
