#!lua flags=allow-oom
-- Last block, terminal event and acknowledgement: there is no state between them in which a worker could die.
-- KEYS: request, log, channel, rate, lanes rt, std, bulk
-- ARGV: epoch, owner, group, state, terminal seq, terminal type, terminal event,
--       then the last block: seq, type, event, committed blocks, produced tokens, nfe; without one nothing,
--       or what an end without text has cost: '', '', '', blocks, '', nfe
-- Returns 1 done, 0 was done already, -1 fenced, -2 a gap
local lanes = { rt = KEYS[5], std = KEYS[6], bulk = KEYS[7] }
local request = fetch(KEYS[1], 'st', 'ep', 'own', 'seq', 'cap', 'eid', 'ret', 'lane')
if request.st and TERMINAL[request.st] and request.ep == ARGV[1] and request.own == ARGV[2] then
  return request.seq == ARGV[5] and 0 or -1
end
local whole = countable(request.seq) and countable(request.cap) and countable(request.ret)
  and entry_id(request.eid) and lanes[request.lane or '']
if not whole or not owned(request, ARGV[1], ARGV[2]) then return -1 end
local seq = tonumber(request.seq)
local block = tonumber(ARGV[8])
local appends = block and block > seq
if (appends and block ~= seq + 1) or tonumber(ARGV[5]) ~= (appends and block or seq) + 1 then return -2 end
if appends then
  append(KEYS[2], KEYS[3], block, ARGV[9], ARGV[10], ARGV[1], request.cap)
  redis.call('HSET', KEYS[1], 'nb', ARGV[11], 'nt', ARGV[12], 'nfe', ARGV[13])
elseif not block and ARGV[11] then
  redis.call('HSET', KEYS[1], 'nb', ARGV[11], 'nfe', ARGV[13])
end
local names = { request = KEYS[1], log = KEYS[2], channel = KEYS[3], lane = lanes[request.lane], rate = KEYS[4] }
settle(names, ARGV[3], request, ARGV[5], ARGV[1], ARGV[4], ARGV[6], ARGV[7])
return 1
