#!lua flags=allow-oom
-- Commit one block. Progress does not clear `att`: a poison that dies one block later each time would loop for ever.
-- KEYS: request, log, channel
-- ARGV: epoch, owner, seq, type, event, committed blocks, produced tokens, nfe
-- Returns 1 done, 0 was done already, -1 fenced, -2 a gap before seq
local request = fetch(KEYS[1], 'st', 'ep', 'own', 'seq', 'cap', 'dl', 'ret')
local whole = countable(request.seq) and countable(request.dl) and countable(request.ret) and countable(request.cap)
if not whole or not owned(request, ARGV[1], ARGV[2]) then return -1 end
local seq = tonumber(ARGV[3])
if seq <= tonumber(request.seq) then return 0 end
if seq ~= request.seq + 1 then return -2 end
append(KEYS[2], KEYS[3], seq, ARGV[4], ARGV[5], ARGV[1], request.cap)
-- The log begins here, and lives as long as the request.
if seq == 2 then redis.call('PEXPIRE', KEYS[2], math.max(1, request.dl + request.ret - now_ms())) end
redis.call('HSET', KEYS[1], 'seq', seq, 'nb', ARGV[6], 'nt', ARGV[7], 'nfe', ARGV[8])
return 1
