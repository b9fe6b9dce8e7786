-- Fragment: the keys of a queue of jobs, in the order in which every script of the room is given them.
local jobs, records, errors, ready, retries, delayed, put_off, leases, held, succeeded, failed = unpack(KEYS, 1, 11)
local sequence, highest, news, ended, watched, waits, idle, alarm = unpack(KEYS, 12, 19)

-- A command with any number of values, in pieces that Lua can put on its stack; pairs are not torn.
local function in_pieces(command, key, values)
  for from = 1, #values, 4000 do
    redis.call(command, key, unpack(values, from, math.min(from + 3999, #values)))
  end
end

-- What a hash holds under each of the fields, false for each that is not there.
local function values_of(key, fields)
  if #fields <= 4000 then return #fields > 0 and redis.call('HMGET', key, unpack(fields)) or {} end
  local found = {}
  for from = 1, #fields, 4000 do
    for _, value in ipairs(redis.call('HMGET', key, unpack(fields, from, math.min(from + 3999, #fields)))) do
      found[#found + 1] = value
    end
  end
  return found
end
