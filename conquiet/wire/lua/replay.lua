-- Gives a dead letter back to the group that it failed in, once. If the original entry is still there, it becomes
-- pending again under its ID and is due at once; else a copy is appended that only this group gets.
-- KEYS   stream, retry, attempts, replayed, marks of letters that are gone, lease
-- ARGV   offset ms, run, letter, group, original ID, partition, 'copy' if a copy can be appended or '', fields...
-- RETURNS {'OK', ID} | {'AGAIN'} done before | {'NOGROUP'} | {'GONE'} a copy is needed | {'STALE'} the run was given up
--         | {'RESET'} the group is being reset, and would forget it
-- MEMORY adds: a message to be handled
--#include clock
--#include pending
--#include rows
--#include bound
local stream, retry, attempts, replayed, gone, lease = unpack(KEYS)
local offset, run, letter, group, original, partition, copying = unpack(ARGV, 1, 7)
local from = partition .. '/' .. original
if redis.call('HEXISTS', replayed, 'run:' .. run) == 0 then return {'STALE'} end
if redis.call('HEXISTS', replayed, letter) == 1 or redis.call('ZSCORE', gone, letter) then return {'AGAIN'} end
local there = redis.call('EXISTS', stream) == 1 and group_row(stream, group)
if not there then return {'NOGROUP'} end
if redis.call('HEXISTS', lease, 'forget') == 1 then return {'RESET'} end

local function revive()
  -- An entry that is pending or was not delivered yet reaches the group anyhow.
  if is_pending(stream, group, original) or id_below(there['last-delivered-id'], original) then return end
  redis.call('HSET', attempts, original, '0||||' .. from) -- first: when memory is full, nothing is revived
  redis.call('HDEL', attempts, 'c:' .. original)
  redis.call('XCLAIM', stream, group, 'replay#admin', 0, original, 'FORCE', 'JUSTID')
  redis.call('ZADD', retry, string.format('%.0f', now_ms(offset)), original)
end

local function copy()
  local replaced = {retryCount = true, originalMessageId = true, onlyGroup = true, replayedFrom = true}
  local words = {}
  for at = 8, #ARGV, 2 do
    if not replaced[ARGV[at]] then
      words[#words + 1] = ARGV[at]
      words[#words + 1] = ARGV[at + 1]
    end
  end
  for _, word in ipairs({'onlyGroup', group, 'replayedFrom', from}) do words[#words + 1] = word end
  return redis.call('XADD', stream, '*', unpack(words))
end

local id = original
if fields_of(stream, original) then
  revive()
elseif copying ~= '' then
  id = copy()
else
  return {'GONE'}
end
redis.call('HSET', replayed, letter, id)
return {'OK', id}
