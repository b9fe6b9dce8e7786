-- Hands a stream in to be looked after, unless it is unfinished already.
-- KEYS   input, owners
-- ARGV   name, what the entry holds
-- RETURNS {entry ID, 1 if it is new}
-- MEMORY adds: a stream to look after
--#include balance_state
local input, owners = unpack(KEYS)
local name, value = unpack(ARGV)
local id, epoch, owner = state_of(owners, name)
-- One whose entry was removed would never get an owner.
if id and (owner ~= '' or redis.call('XRANGE', input, id, id)[1]) then return {id, 0} end
id = redis.call('XADD', input, '*', FIELD, value)
redis.call('HSET', owners, name, id .. '|' .. (epoch or '0') .. '|')
return {id, 1}
