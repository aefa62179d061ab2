#!lua flags=allow-oom
-- Give a request back at a block boundary. The epoch rises, so that this worker is fenced from here on; the attempt
-- does not count. Its entry keeps its age and is taken at once (idle for a day), or after `delay`.
-- KEYS: request, handed-back hint, lanes rt, std, bulk
-- ARGV: epoch, group, consumer, lease ms, delay ms, how many workers may try what this one cannot (0: any number)
-- Returns 1 done, -1 fenced, 0 still this worker's: so many have tried
local lanes = { rt = KEYS[3], std = KEYS[4], bulk = KEYS[5] }
local request = fetch(KEYS[1], 'st', 'ep', 'own', 'eid', 'lane', 'att', 'unable')
local whole = entry_id(request.eid) and lanes[request.lane or ''] and countable(request.att)
if not whole or not owned(request, ARGV[1], ARGV[3]) then return -1 end
local lease, delay = tonumber(ARGV[4]), tonumber(ARGV[5])
local most, tried = tonumber(ARGV[6]), (tonumber(request.unable) or 0) + 1
if most > 0 then redis.call('HSET', KEYS[1], 'unable', tried) end
if most > 0 and tried >= most then return 0 end
redis.call('HSET', KEYS[1], 'st', 'queued', 'own', '', 'alone', 0)
redis.call('HINCRBY', KEYS[1], 'ep', 1)
redis.call('HINCRBY', KEYS[1], 'att', -1)
local idle = 86400000
if delay > 0 then idle = math.max(0, lease - delay) else redis.call('SET', KEYS[2], 1, 'PX', lease) end
redis.call('XCLAIM', lanes[request.lane], ARGV[2], ARGV[3], 0, request.eid, 'IDLE', idle, 'JUSTID')
return 1
