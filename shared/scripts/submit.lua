#!lua
-- Accept a request. Not allowed when memory is out: it is the only script that brings new work.
-- KEYS: request, log, channel, abort, lane, rate, tenant, [idempotency]
-- ARGV: id, payload, lane, queue limit, queue ms, total ms, retention ms, log cap, prompt tokens, envelope version,
--       body hash, idempotency ms, queued event, group, prefix, tenant, tenant's limit (0 = none), replicas awaited,
--       model's other name, webhook or nothing
-- Returns {ok | dup | idem | conflict | busy | crowded | aborted, id, state | queue length, drain rate per s}
-- crowded: the tenant, not the lane, has as many as it may.
local id, total, retention = ARGV[1], tonumber(ARGV[6]), tonumber(ARGV[7])
local state = redis.call('HGET', KEYS[1], 'st')
if state then
  -- WAIT counts from the last write of its connection: without one it would not wait for the first submit of this id.
  if ARGV[18] ~= '0' then redis.call('HINCRBY', KEYS[1], 'again', 1) end
  return { 'dup', id, state }
end
if KEYS[8] then
  local kept = redis.call('GET', KEYS[8])
  local older, body = string.match(kept or '', '^(%S+) (%S+)$')
  -- The key may outlive what it names: then there is nothing left to return, and the request runs anew.
  if older and redis.call('EXISTS', ARGV[15] .. 'r:' .. older) == 1 then
    if body ~= ARGV[11] then return { 'conflict', older } end
    if ARGV[18] ~= '0' then redis.call('HINCRBY', ARGV[15] .. 'r:' .. older, 'again', 1) end
    return { 'idem', older }
  end
end
local now = now_ms()
local life = total + retention
local born_aborted = redis.call('EXISTS', KEYS[4]) == 1
local eid = false
local counted = ARGV[16] ~= '' and tonumber(ARGV[17]) > 0
if not born_aborted then
  local length, refusal = redis.call('XLEN', KEYS[5]), false
  if length >= tonumber(ARGV[4]) then
    refusal = 'busy'
  elseif counted then
    redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', now)
    local own = redis.call('ZCARD', KEYS[7])
    if own >= tonumber(ARGV[17]) then refusal, length = 'crowded', own end
  end
  if refusal then
    local window = redis.call('HMGET', KEYS[6], 't', 'n', 'r')
    local rate = window[3] or (window[1] and tostring(window[2] * 1000 / math.max(1000, now - window[1]))) or '0'
    return { refusal, id, length, rate }
  end
  if counted then
    redis.call('ZADD', KEYS[7], now + total, id)
    redis.call('PEXPIRE', KEYS[7], math.max(life, redis.call('PTTL', KEYS[7])))
  end
  eid = redis.call('XADD', KEYS[5], '*', 'id', id, 'v', ARGV[10])
end
redis.call('HSET', KEYS[1], 'st', 'queued', 'lane', ARGV[3], 'ep', 0, 'att', 0, 'nb', 0, 'nt', 0, 'nfe', 0, 'seq', 1,
  'pt', ARGV[9], 'dl', now + total, 'qd', now + tonumber(ARGV[5]), 'in', ARGV[2], 't0', now, 'cap', ARGV[8],
  'ret', retention)
if eid then redis.call('HSET', KEYS[1], 'eid', eid) end
if eid and counted then redis.call('HSET', KEYS[1], 'ten', ARGV[16]) end
if ARGV[19] ~= '' then redis.call('HSET', KEYS[1], 'name', ARGV[19]) end
if ARGV[20] then redis.call('HSET', KEYS[1], 'hook', ARGV[20]) end
-- Seq 1 is not in the log: `replay` makes it up. A stream takes 4 KiB with its first entry, and most of what waits in a
-- lane has no other yet.
redis.call('PUBLISH', KEYS[3], ARGV[13])
redis.call('PEXPIRE', KEYS[1], life)
if KEYS[8] then redis.call('SET', KEYS[8], id .. ' ' .. ARGV[11], 'PX', ARGV[12]) end
if born_aborted then
  local names = { request = KEYS[1], log = KEYS[2], channel = KEYS[3], lane = KEYS[5], rate = KEYS[6] }
  local request = { cap = ARGV[8], ret = retention, pt = ARGV[9] }
  settle(names, ARGV[14], request, 2, 0, 'aborted', 'finished', aborted_event(id, 2, 0, request))
  return { 'aborted', id, 'aborted' }
end
return { 'ok', id, 'queued' }
