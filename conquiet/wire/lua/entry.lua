-- Fragment: the fields of a message, given as one of many rows; conquiet/topics/format/envelope.py has them too.
-- A row is a number, 1 for a key + 2 for headers + 4 for an ID, and in this order the payload and what it has of these.

local row_fields = {'key', 'headers', 'messageId'}
local row_widths = {[0] = 1, 2, 2, 3, 2, 3, 3, 4} -- how many values a row has; its ID is the last one

local function has_field(kind, bit)
  return math.floor(kind / 2 ^ (bit - 1)) % 2 == 1
end

-- Appends the row whose values begin at `at`. Rows with a key, or with nothing, are most of all: those cost no table
-- each, which would be a fourth of the time.
local function append_row(stream, timestamp, kind, values, at)
  if kind == 1 then
    return redis.call('XADD', stream, '*', 'payload', values[at], 'timestamp', timestamp, 'key', values[at + 1])
  elseif kind == 0 then
    return redis.call('XADD', stream, '*', 'payload', values[at], 'timestamp', timestamp)
  end
  local entry = {'payload', values[at], 'timestamp', timestamp}
  for bit, name in ipairs(row_fields) do
    if has_field(kind, bit) then
      at = at + 1
      entry[#entry + 1], entry[#entry + 2] = name, values[at]
    end
  end
  return redis.call('XADD', stream, '*', unpack(entry))
end
