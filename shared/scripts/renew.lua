#!lua flags=allow-oom
-- Hold a lease: take it if it is free, prolong it if it is mine.
-- KEYS: lease
-- ARGV: holder, ms
-- Returns 1 if it is mine, else 0
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
