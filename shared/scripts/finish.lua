#!lua flags=allow-oom
-- Last block, terminal event and acknowledgement: there is no state between them in which a worker could die.
-- KEYS: request, log, channel, rate, lanes rt, std, bulk
-- ARGV: epoch, group, state, terminal seq, terminal type, terminal event,
--       then the last block or nothing: seq, type, event, committed blocks, produced tokens, nfe
-- Returns 1 done, 0 was done already, -1 fenced, -2 a gap
local lanes = { rt = KEYS[5], std = KEYS[6], bulk = KEYS[7] }
local request = fetch(KEYS[1], 'st', 'ep', 'seq', 'cap', 'eid', 'ret', 'lane')
if not request.st or request.ep ~= ARGV[1] then return -1 end
if TERMINAL[request.st] then return request.seq == ARGV[4] and 0 or -1 end
if request.st ~= 'running' then return -1 end
local seq = tonumber(request.seq)
local block = tonumber(ARGV[7])
local appends = block and block > seq
if (appends and block ~= seq + 1) or tonumber(ARGV[4]) ~= (appends and block or seq) + 1 then return -2 end
if appends then
  append(KEYS[2], KEYS[3], block, ARGV[8], ARGV[9], ARGV[1], request.cap)
  redis.call('HSET', KEYS[1], 'nb', ARGV[10], 'nt', ARGV[11], 'nfe', ARGV[12])
end
local names = { request = KEYS[1], log = KEYS[2], channel = KEYS[3], lane = lanes[request.lane], rate = KEYS[4] }
settle(names, ARGV[2], request, ARGV[4], ARGV[1], ARGV[3], ARGV[5], ARGV[6])
return 1
