-- Fragment: where a group stands without having been given anything. Needs the fragment rows.

-- Puts a group, of which `there` is the row, after an ID. A server from 7.0 on is told how many entries were ever
-- appended up to there ('' if that is not known), so that it knows the lag; an older one has no words for it.
local function put_after(stream, there, id, entries)
  if entries ~= '' and there['entries-read'] ~= nil then
    redis.call('XGROUP', 'SETID', stream, there['name'], id, 'ENTRIESREAD', entries)
  else
    redis.call('XGROUP', 'SETID', stream, there['name'], id)
  end
end
