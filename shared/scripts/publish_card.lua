#!lua
-- Write a model card, unless the one there has its digest. The field `created` tells when it was first written, in
-- seconds since 1970, and `by` who has published it last.
-- KEYS: card
-- ARGV: digest, publisher, who must have published the one there ('*': anybody), then fields and values
-- Returns 1, or 0 if another has published since
local by = redis.call('HGET', KEYS[1], 'by') or ''
if ARGV[3] ~= '*' and by ~= ARGV[3] and by ~= ARGV[2] then return 0 end
if redis.call('HGET', KEYS[1], 'digest') ~= ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('HSET', KEYS[1], unpack(ARGV, 4))
end
redis.call('HSET', KEYS[1], 'by', ARGV[2])
if not redis.call('HGET', KEYS[1], 'created') then
  redis.call('HSET', KEYS[1], 'created', redis.call('TIME')[1])
end
return 1
