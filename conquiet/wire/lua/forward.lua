-- Appends dead letters from an outbox to the topic's dead-letter stream, each once however often it is sent and
-- whoever else is at it. A forwarder claims the outbox before it reads it. Only the last one to claim may append, and
-- what was appended is remembered until it is known to have left the outbox: then nobody can have it still at hand.
-- KEYS   dead letters, forwarded
-- ARGV   offset ms, outbox, claim, 'claim' or '', most letters or -1, most age ms or -1, ID before which all letters
--        have left the outbox, then for each letter: its ID in the outbox, number of words, these words...
-- RETURNS letters appended | -1 another claim came in between
-- MEMORY keeps: a letter that arrives can leave its outbox
--#include clock
--#include full_memory
--#include rows
--#include bound
local letters, forwarded = KEYS[1], KEYS[2]
go_on_when_full(forwarded)
local offset, outbox, claim, claiming, most, age, left = unpack(ARGV, 1, 7)
local holder, rest = string.match(redis.call('HGET', forwarded, outbox) or '', '^(%S+)(.*)$')
if claiming ~= '' then
  redis.call('HSET', forwarded, outbox, claim .. (rest or ''))
  return 0
end
if holder ~= claim then return -1 end

local known, ids = {}, {}
for id in string.gmatch(rest, '%S+') do
  if not id_below(id, left) then
    known[id] = true
    ids[#ids + 1] = id
  end
end

local function remember()
  if #ids == 0 then return redis.call('HDEL', forwarded, outbox) end
  return redis.call('HSET', forwarded, outbox, claim .. ' ' .. table.concat(ids, ' '))
end

local appended, at = 0, 8
while at <= #ARGV do
  local id, words = ARGV[at], {}
  for word = at + 2, at + 1 + tonumber(ARGV[at + 1]) do words[#words + 1] = ARGV[word] end
  if not known[id] then
    local done = redis.pcall('XADD', letters, '*', unpack(words))
    if type(done) == 'table' then
      remember()
      return done
    end
    ids[#ids + 1] = id
    appended = appended + 1
  end
  at = at + 2 + #words
end
remember()
if appended == 0 then return 0 end

-- Up to a thousand at a time, in whole nodes; what is left then is less than a node, and goes one by one.
local function trim(by, limit)
  if redis.call('XTRIM', letters, by, '~', limit, 'LIMIT', 1000) < 900 then redis.call('XTRIM', letters, by, limit) end
end
if tonumber(most) >= 0 then trim('MAXLEN', most) end
local since = now_ms(offset) - tonumber(age)
if tonumber(age) >= 0 and since > 0 then trim('MINID', string.format('%.0f', since)) end
return appended
