#!lua
-- Write a model card, unless the one there has its digest.
-- KEYS: card
-- ARGV: digest, then fields and values
if redis.call('HGET', KEYS[1], 'digest') ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
end
return 1
