-- Fragment: a row of XINFO as a table.
local function row(flat)
  local named = {}
  for at = 1, #flat, 2 do named[flat[at]] = flat[at + 1] end
  return named
end

-- The row of a group of a stream that exists; nil if there is no such group.
local function group_row(stream, group)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local named = row(flat)
    if named['name'] == group then return named end
  end
  return nil
end
