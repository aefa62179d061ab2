#!lua flags=allow-oom
-- Make a webhook that was given up due again, with all its tries before it.
-- KEYS: webhooks due, webhook, webhooks given up
-- ARGV: id
-- Returns 1, or 0 if there is none
if redis.call('ZREM', KEYS[3], ARGV[1]) == 0 or redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
redis.call('HSET', KEYS[2], 'n', 0)
redis.call('PEXPIRE', KEYS[2], HOOK_LIFE)
redis.call('ZADD', KEYS[1], now_ms(), ARGV[1])
redis.call('PEXPIRE', KEYS[1], HOOK_LIFE)
return 1
