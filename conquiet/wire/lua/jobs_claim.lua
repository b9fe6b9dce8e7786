-- Gives up leases that have run out, lets jobs whose time has come get in line, and leases what is wanted.
-- KEYS   all of the queue's, as in the fragment jobs_keys
-- ARGV   offset ms, longest history, error of an expired lease, worker, the claim's own ID, ttl ms, most retries, then
--        how many jobs, how many of them first to those tried before, how many then to those that have waited longest,
--        how many bytes of jobs, name of the store, 1 if the caller waits for more when it gets less than it wants, and 1 if
--        others wait there
-- RETURNS {now ms, token of all that were never claimed before, ms until more may be there or -1,
--        IDs of the last news to all and to the store or 'now' if there may be more,
--        {ID, 1 if failed else 0... of the expired}, {IDs that are no jobs and were taken out of line...},
--        {ID, first writing, '' or "attempts token ready", errors or nil... of the claimed, in claim order}}
-- MEMORY adds: work under way; who cannot begin anything lets no lease run out either
--#include clock
--#include full_memory
--#include jobs_keys
--#include jobs_record
--#include jobs_waits
--#include jobs_wake
--#include jobs_change
local offset, history, lapsed, worker, claim_id, ttl, max_retries, count, from_tried, from_oldest, most_bytes = unpack(ARGV)
local name, waits_for_more, is_shared = ARGV[12], ARGV[13] == '1', ARGV[14] == '1'
local now = now_ms(offset)
local expired, broken, moved = {}, {}, 0
-- What one call moves at most: leases that ran out, and jobs that fell due.
local most_expired, most_due = 500, 1000

local late = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, most_expired, 'WITHSCORES')
local due = redis.call('ZRANGEBYSCORE', delayed, '-inf', now, 'LIMIT', 0, most_due)
-- Who cannot begin anything must not let others' leases run out either: all of this is done, or nothing.
local has_work, has_room = #late > 0 or #due > 0 or redis.call('EXISTS', ready) == 1, true
if has_work then stop_when_full(sequence) else has_room = not is_memory_full(sequence) end
if #late > 0 then
  local ids = {}
  for at = 1, #late, 2 do ids[#ids + 1] = late[at] end
  local noted = values_of(errors, ids)
  for at, text in ipairs(values_of(records, ids)) do
    local id, lapse = ids[at], tonumber(late[2 * at])
    local job = text and parsed(id, text)
    if job and job.state == 'I' then
      note_error(job, noted[at], lapsed, lapsed, lapse, tonumber(history))
      if job.attempts > tonumber(job.most == '-' and max_retries or job.most) then
        fail(job, now)
      else
        job.state, job.ready = 'R', lapse
        line_up(job, now)
      end
      keep(id, written(job))
      expired[#expired + 1] = id
      expired[#expired + 1] = job.state == 'F' and 1 or 0
    else
      broken[#broken + 1] = id
    end
    unleased[#unleased + 1] = id
  end
end
for _, place in ipairs(due) do
  now_ready[#now_ready + 1] = '0'
  now_ready[#now_ready + 1] = place
  note_wait(string.sub(place, 1, 10), since_of(place))
  if string.sub(place, 38, 38) == '1' then
    now_retries[#now_retries + 1] = '0'
    now_retries[#now_retries + 1] = place
  end
end
moved = #now_ready
in_pieces('ZREM', delayed, due)
in_pieces('ZREM', put_off, due)
write_down()

-- The places to take, in claim order, and those of them that have a share.
local function chosen()
  count, from_tried, from_oldest = tonumber(count), tonumber(from_tried), tonumber(from_oldest)
  if count <= 0 then return {}, {} end
  local is_taken, first = {}, {}
  if from_tried > 0 then
    first = redis.call('ZRANGE', retries, 0, from_tried - 1)
    for _, place in ipairs(first) do is_taken[place] = true end
  end
  if from_oldest > 0 then
    for _, place in ipairs(longest_waiting(from_oldest, is_taken)) do first[#first + 1] = place end
  end
  local head = redis.call('ZRANGE', ready, 0, count - 1)
  if #first == 0 then return head, first end
  local all, left = {}, count - #first
  for _, place in ipairs(head) do
    local was_taken = is_taken[place]
    if was_taken or left > 0 then
      all[#all + 1] = place
      is_taken[place] = nil
      if not was_taken then left = left - 1 end
    end
  end
  local is_sorted = true
  for _, place in ipairs(first) do
    if is_taken[place] then
      all[#all + 1] = place
      is_sorted = false
    end
  end
  -- They differ in their digits at the latest, so the server's collation has no say in this.
  if not is_sorted then table.sort(all) end
  return all, first
end

local function id_of(place)
  return string.sub(place, 39)
end

-- What was enqueued under each ID; nil if that is too much for one call. Some at a time, since any may be large.
local function firsts_of(ids)
  local found, size = {}, 0
  for from = 1, #ids, 16 do
    for _, first in ipairs(redis.call('HMGET', jobs, unpack(ids, from, math.min(from + 15, #ids)))) do
      found[#found + 1] = first
      size = size + (first and #first or 0)
    end
    if size > most_bytes and #ids > 1 then return nil end
  end
  return found
end

-- Those of the places that fit into one call, and at least one: who has a share comes before the others.
local function fitting(places, first)
  local fits, size, kept = {}, 0, {}
  for _, some in ipairs({first, places}) do
    for _, place in ipairs(some) do
      if size < most_bytes and not fits[place] then
        fits[place] = true
        size = size + redis.call('HSTRLEN', jobs, id_of(place))
      end
    end
  end
  for _, place in ipairs(places) do
    if fits[place] then
      kept[#kept + 1] = place
    else
      note_wait(string.sub(place, 1, 10), since_of(place))
    end
  end
  write_waits()
  return kept
end

local function ids_of(places)
  local ids = {}
  for at, place in ipairs(places) do ids[at] = id_of(place) end
  return ids
end

most_bytes = tonumber(most_bytes)
local places, with_share = chosen()
local ids, tried = ids_of(places), {}
local firsts = firsts_of(ids)
if not firsts then
  places = fitting(places, with_share)
  ids = ids_of(places)
  firsts = values_of(jobs, ids)
end
for _, place in ipairs(places) do
  if string.sub(place, 38, 38) == '1' then tried[#tried + 1] = place end
end
in_pieces('ZREM', ready, places)
in_pieces('ZREM', retries, tried)

local claimed, texts, leased, holding = {}, {}, {}, {}
local again, at_of = {}, {}
local put, now_text, until_text = 0, string.format('%d', now), string.format('%d', now + tonumber(ttl))
-- Higher than any token that the queue knows of, and than any that it has forgotten if its clock went on meanwhile.
local base = math.max(tonumber(redis.call('GET', highest) or 0) + 1, now)
local top, token_of = base, '%d.' .. claim_id
local begin, by_worker = string.format('I - 1 ' .. token_of .. ' %s ', base, now_text), ' ' .. #worker .. ' ' .. worker
local known = values_of(records, ids)
for at, id in ipairs(ids) do
  local text, first, counts = nil, firsts[at], ''
  local since = first and since_first(first)
  if since and not known[at] then
    text = begin .. since .. by_worker
  elseif since then
    local job = parsed(id, known[at])
    if job and job.state == 'R' then
      local token = math.max(number_of(job.token) + 1, base)
      top = math.max(top, token)
      job.state, job.attempts, job.token = 'I', job.attempts + 1, string.format(token_of, token)
      job.worker, job.claimed = worker, now_text
      text, counts = written(job), string.format('%d %d %d', job.attempts, token, job.ready)
    end
  end
  if text then
    texts[put + 1], texts[put + 2] = id, text
    leased[put + 1], leased[put + 2] = until_text, id
    holding[put + 1], holding[put + 2] = string.sub(places[at], 26, 37), id
    claimed[2 * put + 1], claimed[2 * put + 2], claimed[2 * put + 3] = id, first, counts
    claimed[2 * put + 4] = false
    if counts ~= '' then
      again[#again + 1] = id
      at_of[id] = 2 * put + 4
    end
    put = put + 2
  else
    broken[#broken + 1] = id
  end
end
for at, noted in ipairs(values_of(errors, again)) do claimed[at_of[again[at]]] = noted end
in_pieces('HSET', records, texts)
in_pieces('ZADD', leases, leased)
in_pieces('ZADD', held, holding)
if #places > 0 and redis.call('EXISTS', ready) == 0 then redis.call('DEL', waits) end
if put > 0 then redis.call('SET', highest, string.format('%d', top)) end

local due_at, lapse_at = earliest()
local left, passes = redis.call('ZCARD', ready), 0
local is_full = count > 0 and #places >= count
local mark = (is_full or #places > 0 and left > 0) and 'now' or last_of(news) .. '/' .. last_of(news .. ':' .. name)
if has_room and waits_for_more and mark ~= 'now' then
  stay(now, name)
  -- What falls due is left to one of those who wait. What runs out is not: that one might be the owner, and dead.
  if due_at > now and due_at < math.huge and not is_to_look(now, name, due_at) then due_at = math.huge end
elseif has_room and not is_shared and part(name) and due_at < math.huge then
  passes = 1
end
local next_at = math.min(due_at, lapse_at)
local next_ms = next_at < math.huge and math.max(0, next_at - now) or -1
-- A store that takes all it can and leaves some tells another: it may have been the only one that was told. Of what fell due
-- or ran out just now no store was told.
if left > 0 then passes = moved > 0 and left or is_full and 1 or passes end
if passes > 0 and wake(now, passes) == 0 and moved > 0 and left > 0 then tell_all() end
return {now_text, base, next_ms, mark, expired, broken, claimed}
