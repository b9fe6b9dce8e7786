-- Who holds the leases of partitions; on a Cluster those of one slot, else any number of them.
-- KEYS   leases...
-- ARGV   none
-- RETURNS {owner or '', held until ms or '', how often the group was put elsewhere or '', owner, ...}
-- MEMORY reads
local reply = {}
for _, lease in ipairs(KEYS) do
  local held = redis.call('HMGET', lease, 'owner', 'until_ms', 'resets')
  for at = 1, 3 do reply[#reply + 1] = held[at] or '' end
end
return reply
