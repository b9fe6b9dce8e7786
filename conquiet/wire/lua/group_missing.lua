-- Which partitions do not have a group; on a Cluster those of one slot, else any number of them.
-- KEYS   streams...
-- ARGV   group
-- RETURNS positions of the streams without it, from 1 on; what is no stream is among them
-- MEMORY reads
local missing = {}
for at, stream in ipairs(KEYS) do
  local there = false
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  for _, flat in ipairs(groups.err and {} or groups) do there = there or flat[2] == ARGV[1] end
  if not there then missing[#missing + 1] = at end
end
return missing
