#!lua flags=allow-oom
-- Have a receiver told of something that ended elsewhere; again only if it has been told and forgotten since.
-- KEYS: webhooks due, webhook
-- ARGV: prefix, id, to, what is told
if redis.call('EXISTS', KEYS[2]) == 0 then record_hook(ARGV[1], ARGV[2], ARGV[3], ARGV[4], now_ms()) end
return 1
