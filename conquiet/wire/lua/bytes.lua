-- Fragment: how much a script reads. Lua copies each entry twice, a megabyte in about a millisecond and a half; so what
-- reads entries stops after so many bytes, and is asked again for the rest.
local most_bytes = 1048576

-- The bytes of an entry's fields.
local function size_of(fields)
  local size = 0
  for at = 1, #fields do size = size + #fields[at] end
  return size
end

-- How many entries to read at once: few at first, since they may be large; and never so many that one page of large
-- ones, after all those before were small, takes long.
local function next_page(is_first, most)
  return math.min(most, is_first and 4 or 24)
end
