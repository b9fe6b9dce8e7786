-- Fragment: the server's time in milliseconds, moved by an offset that is 0 outside of tests.
local function now_ms(offset)
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(offset)
end
