#!lua
-- Write a model card, unless the one there has its digest. The field `created` tells when it was first written, in
-- seconds since 1970.
-- KEYS: card
-- ARGV: digest, then fields and values
if redis.call('HGET', KEYS[1], 'digest') ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
end
if not redis.call('HGET', KEYS[1], 'created') then
  redis.call('HSET', KEYS[1], 'created', redis.call('TIME')[1])
end
