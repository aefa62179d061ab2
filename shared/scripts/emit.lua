#!lua flags=allow-oom
-- Commit one block. Progress does not clear `att`: a poison that dies one block later each time would loop for ever.
-- KEYS: request, log, channel
-- ARGV: epoch, seq, type, event, committed blocks, produced tokens, nfe
-- Returns 1 done, 0 was done already, -1 fenced, -2 a gap before seq
local request = fetch(KEYS[1], 'st', 'ep', 'seq', 'cap')
if request.st ~= 'running' or request.ep ~= ARGV[1] then return -1 end
local seq = tonumber(ARGV[2])
if seq <= tonumber(request.seq) then return 0 end
if seq ~= request.seq + 1 then return -2 end
append(KEYS[2], KEYS[3], seq, ARGV[3], ARGV[4], ARGV[1], request.cap)
redis.call('HSET', KEYS[1], 'seq', seq, 'nb', ARGV[5], 'nt', ARGV[6], 'nfe', ARGV[7])
return 1
