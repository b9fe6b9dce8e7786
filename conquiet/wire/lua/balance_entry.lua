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

-- The name of the stream that an entry hands in; nil and the reason if it hands in none.
local function name_in(value)
  if not value then return nil, 'there is no field ' .. FIELD end
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

-- How many were set aside: 0 while the place for it is elsewhere, and the entry is looked at again later.
local function set_aside(input, group, bad, id, fields, reason)
  local entry = cmsgpack.pack(fields)
  local done = redis.pcall('XADD', bad, 'MAXLEN', '~', 10000, '*', 'id', id, 'reason', reason, 'entry', entry)
  if type(done) == 'table' and done.err then return 0 end
  forget_entry(input, group, id)
  return 1
end
