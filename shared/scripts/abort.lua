#!lua flags=allow-oom
-- Ask for the end of a request; idempotent. The key outlives everything: a worker that takes over sees it, and so does
-- a submit that comes later.
-- KEYS: request, log, channel, abort, rate, lanes rt, std, bulk
-- ARGV: id, group, reason, time to live ms
-- Returns the state: unknown | running | a terminal state
local lanes = { rt = KEYS[6], std = KEYS[7], bulk = KEYS[8] }
local request = fetch(KEYS[1], 'st', 'ep', 'seq', 'cap', 'eid', 'ret', 'lane', 'pt', 'nt', 'nb', 'nfe', 'att',
  'dl', 'qd', 't0', 'in', 'own')
if request.st and TERMINAL[request.st] then return request.st end
redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[4])
if not sound(request, lanes[request.lane or ''] or '') then return 'unknown' end
if request.st == 'running' then return 'running' end
local seq, epoch = request.seq + 1, tonumber(request.ep)
local names = { request = KEYS[1], log = KEYS[2], channel = KEYS[3], lane = lanes[request.lane], rate = KEYS[5] }
settle(names, ARGV[2], request, seq, epoch, 'aborted', 'finished', aborted_event(ARGV[1], seq, epoch, request))
return 'aborted'
