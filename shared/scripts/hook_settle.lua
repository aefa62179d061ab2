#!lua flags=allow-oom
-- Say what became of one try.
-- KEYS: webhooks due, webhook, webhooks given up, counts
-- ARGV: prefix, id, number of the try, told | again | later | dead, ms until the next try, why
-- later: it was not tried at all, and the try does not count.
-- Returns 1, or 0 if somebody else has taken it since
local request = fetch(KEYS[2], 'n')
if request.n ~= ARGV[3] then return 0 end
local id, outcome, now = ARGV[2], ARGV[4], now_ms()
if outcome == 'later' then
  redis.call('HINCRBY', KEYS[2], 'n', -1)
  redis.call('ZADD', KEYS[1], now + ARGV[5], id)
  return 1
end
redis.call('HINCRBY', KEYS[4], outcome, 1)
redis.call('PEXPIRE', KEYS[4], 2592000000)
if outcome == 'told' then
  redis.call('ZREM', KEYS[1], id)
  redis.call('DEL', KEYS[2])
  return 1
end
redis.call('HSET', KEYS[2], 'why', ARGV[6])
redis.call('PEXPIRE', KEYS[2], HOOK_LIFE)
if outcome == 'again' then
  redis.call('ZADD', KEYS[1], now + ARGV[5], id)
  redis.call('PEXPIRE', KEYS[1], HOOK_LIFE)
  return 1
end
redis.call('ZREM', KEYS[1], id)
redis.call('ZADD', KEYS[3], now, id)
redis.call('PEXPIRE', KEYS[3], HOOK_LIFE)
-- Those whose hash is gone, and the oldest of too many.
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - HOOK_LIFE)
local over = redis.call('ZCARD', KEYS[3]) - 10000
if over > 0 then
  for _, oldest in ipairs(redis.call('ZRANGE', KEYS[3], 0, over - 1)) do
    redis.call('ZREM', KEYS[3], oldest)
    redis.call('DEL', ARGV[1] .. 'hook:' .. oldest)
  end
end
return 1
