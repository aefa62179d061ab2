#!lua flags=allow-oom
-- End a request whose deadline has passed although no worker says so: a fleet without workers still answers. A running
-- one gets `grace` for its worker to end it; then the epoch rises and the worker is fenced.
-- KEYS: request, log, channel, rate, lanes rt, std, bulk
-- ARGV: id, group, grace ms
-- Returns the state: unknown | queued | running | a terminal state
local lanes = { rt = KEYS[5], std = KEYS[6], bulk = KEYS[7] }
local request = fetch(KEYS[1], 'st', 'ep', 'seq', 'cap', 'eid', 'ret', 'lane', 'dl', 'qd',
  'att', 'nb', 'nt', 'nfe', 'pt', 't0', 'in', 'own')
if not request.st then return 'unknown' end
if TERMINAL[request.st] then return request.st end
if not sound(request, lanes[request.lane or ''] or '') then return 'unknown' end
local now, epoch, seq = now_ms(), request.ep + 1, request.seq + 1
local deadline = tonumber(request.dl)
if request.st == 'running' then
  deadline = deadline + ARGV[3]
elseif epoch == 1 then
  deadline = math.min(deadline, tonumber(request.qd))
end
if now <= deadline then return request.st end
local names = { request = KEYS[1], log = KEYS[2], channel = KEYS[3], lane = lanes[request.lane], rate = KEYS[4] }
local message = epoch == 1 and 'the deadline passed before a worker was free' or 'the deadline passed'
settle(names, ARGV[2], request, seq, epoch, 'expired', 'failed', failed_event(ARGV[1], seq, epoch, 'expired', message))
return 'expired'
