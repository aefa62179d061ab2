#!lua flags=allow-oom
-- Commit one block. Progress does not clear `att`: a poison that dies one block later each time would loop for ever.
-- KEYS: request, log, channel
-- ARGV: epoch, owner, seq, type, event, committed blocks, produced tokens, nfe
-- Returns 1 done, 0 was done already, -1 fenced, -2 a gap before seq
local request = fetch(KEYS[1], 'st', 'ep', 'own', 'seq', 'cap')
if not owned(request, ARGV[1], ARGV[2]) or not tonumber(request.seq) or not string.match(request.cap or '', '^%d+$') then return -1 end
local seq = tonumber(ARGV[3])
if seq <= tonumber(request.seq) then return 0 end
if seq ~= request.seq + 1 then return -2 end
append(KEYS[2], KEYS[3], seq, ARGV[4], ARGV[5], ARGV[1], request.cap)
redis.call('HSET', KEYS[1], 'seq', seq, 'nb', ARGV[6], 'nt', ARGV[7], 'nfe', ARGV[8])
return 1
