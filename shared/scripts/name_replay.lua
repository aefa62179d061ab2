#!lua
-- Decide under which id a dead request is submitted again: the first to ask does, for all that ask later.
-- KEYS: request
-- ARGV: new id
-- Returns that id, or nothing if there is no dead request
local state, named = unpack(redis.call('HMGET', KEYS[1], 'st', 'as'))
if state ~= 'dead' then return false end
if named then return named end
redis.call('HSET', KEYS[1], 'as', ARGV[1])
return ARGV[1]
