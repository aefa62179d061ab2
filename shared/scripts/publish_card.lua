#!lua
-- Write a model card, unless the one there has its digest. Returns 1 if it took another one's place, else 0. The field
-- `created` tells when it was first written, in seconds since 1970.
-- KEYS: card
-- ARGV: digest, then fields and values
local former = redis.call('HGET', KEYS[1], 'digest')
if former ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
end
if not redis.call('HGET', KEYS[1], 'created') then
  redis.call('HSET', KEYS[1], 'created', redis.call('TIME')[1])
end
return former and former ~= ARGV[1] and 1 or 0
