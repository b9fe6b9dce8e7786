-- Fragment: what an entry of the input says, and what becomes of one that says nothing.

local function is_utf8(text)
  local at = 1
  while at <= #text do
    local byte = string.byte(text, at)
    local more = byte < 0x80 and 0 or byte >= 0xC2 and byte < 0xE0 and 1 or byte >= 0xE0 and byte < 0xF0 and 2
      or byte >= 0xF0 and byte < 0xF5 and 3
    if not more then return false end
    for offset = 1, more do
      local following = string.byte(text, at + offset)
      if not following or following < 0x80 or following > 0xBF then return false end
      if offset == 1 and ((byte == 0xE0 and following < 0xA0) or (byte == 0xED and following > 0x9F)
        or (byte == 0xF0 and following < 0x90) or (byte == 0xF4 and following > 0x8F)) then
        return false
      end
    end
    at = at + 1 + more
  end
  return true
end

local LONGEST, DEEPEST = 1048576, 254 -- bytes of what is decoded here, and how deep it may be nested
local KEPT = 65536 -- bytes of an entry above that size which are set aside

-- Whether some JSON is nested deeper than is decoded here; of what is no JSON, anything.
local function is_too_deep(value)
  local at, depth = 1, 0
  if select(2, string.gsub(value, '[%[{]', '')) <= DEEPEST then return false end
  while true do
    at = string.find(value, '["%[%]{}]', at)
    if not at then return false end
    local sign = string.sub(value, at, at)
    if sign == '"' then
      repeat -- a quote or a backslash and what it escapes
        at = string.find(value, '["\\]', at + 1)
        if not at then return false end
        local is_end = string.sub(value, at, at) == '"'
        if not is_end then at = at + 1 end
      until is_end
    else
      depth = depth + ((sign == '[' or sign == '{') and 1 or -1)
      if depth > DEEPEST then return true end
    end
    at = at + 1
  end
end

-- The name of the stream that an entry hands in; nil and the reason if it hands in none.
local function name_in(value)
  if not value then return nil, 'there is no field ' .. FIELD end
  if #value > LONGEST then return nil, 'the field ' .. FIELD .. ' is longer than 1 MB' end
  if is_too_deep(value) then return nil, 'the field ' .. FIELD .. ' is nested too deep' end
  local ok, found = pcall(cjson.decode, value)
  if not ok or type(found) ~= 'table' then return nil, 'the field ' .. FIELD .. ' is no JSON object' end
  local name = found['DataStreamName']
  if type(name) ~= 'string' or name == '' or #name > 1024 or not is_utf8(name) then
    return nil, 'DataStreamName is no name'
  end
  local info = found['Info']
  if info ~= nil and info ~= cjson.null and type(info) ~= 'table' then return nil, 'Info is no object' end
  return name
end

local function forget_entry(input, group, id)
  redis.call('XACK', input, group, id)
  redis.call('XDEL', input, id)
end

-- The first bytes of an entry that is too long to be kept whole.
local function beginning_of(fields)
  local kept, left = {}, KEPT
  for place, word in ipairs(fields) do
    if left <= 0 then break end
    kept[place] = string.sub(word, 1, left)
    left = left - #word - 1
  end
  return kept
end

-- How many were set aside: 0 while the place for it is elsewhere, and the entry is looked at again later.
local function set_aside(input, group, bad, id, fields, reason)
  local size = 0
  for _, word in ipairs(fields) do size = size + #word + 1 end
  if size > LONGEST then fields = beginning_of(fields) end
  local entry = cmsgpack.pack(fields)
  local done = redis.pcall('XADD', bad, 'MAXLEN', '~', 10000, '*', 'id', id, 'reason', reason, 'entry', entry)
  if type(done) == 'table' and done.err then return 0 end
  forget_entry(input, group, id)
  return 1
end
