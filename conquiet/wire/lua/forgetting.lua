-- Fragment: a group of a partition that is made to forget what it has not finished, page by page. The lease is marked
-- from the first page to the last. Meanwhile nothing is delivered, and whoever takes the lease goes on with it.
-- Needs the fragment rows.

-- Begins: the group, which is made if need be, stands where it is to go on, and only then entries are forgotten. In the
-- other order retention could remove entries before the group stands in front of them.
local function begin_forgetting(lease, stream, retry, attempts, group, id)
  redis.call('UNLINK', retry, attempts)
  if redis.call('EXISTS', stream) == 1 and group_row(stream, group) then
    redis.call('XGROUP', 'SETID', stream, group, id)
  else
    redis.call('XGROUP', 'CREATE', stream, group, id, 'MKSTREAM')
  end
  redis.call('HSET', lease, 'forget', 1)
end

-- Forgets one page of entries; whether there may be more.
local function forget_page(lease, stream, group, size)
  local ids = {}
  for at, entry in ipairs(redis.call('XPENDING', stream, group, '-', '+', size)) do ids[at] = entry[1] end
  if #ids > 0 then redis.call('XACK', stream, group, unpack(ids)) end
  if #ids == tonumber(size) then return true end
  redis.call('HDEL', lease, 'forget')
  return false
end
