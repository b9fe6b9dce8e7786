-- Fragment: what happens when the server's memory is full (maxmemory, and nothing may be evicted). A server refuses a
-- command that may need memory, in a script too, but only as long as the script has written nothing: the first write
-- decides for the whole script. What a script is then, its head says under MEMORY: it frees or keeps, and goes on; it
-- adds, and is refused before it has changed anything; or it reads.

-- To be called before all other writes by what settles or frees: from here on nothing is refused. Changes nothing; the
-- key is one that has no time to live, or is not to have it any more, whatever its type, there or not.
local function go_on_when_full(key)
  redis.call('PERSIST', key)
end

-- To be called before all other writes by what makes more of anything: fails if memory is full, and nothing was done.
-- Changes nothing; the key is that of a string, there or not.
local function stop_when_full(key)
  redis.call('SETRANGE', key, 0, '')
end

-- The same, by the key of a hash, there or not, and a counter in it: it is left at what it is, or begins at 0.
local function stop_when_full_at(key, counter)
  redis.call('HINCRBY', key, counter, 0)
end

-- Whether memory is full, by the key of a string; changes nothing.
local function is_memory_full(key)
  local reply = redis.pcall('SETRANGE', key, 0, '')
  return type(reply) == 'table' and reply.err ~= nil
end
