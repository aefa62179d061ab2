#!lua flags=allow-oom
-- Renew the leases of all slots of a worker, and say which it has lost. Without the epoch check a paused worker that
-- wakes up would steal its entries back.
-- KEYS: worker, workers, officers, lanes rt, std, bulk, then for each request: hash, abort key
-- ARGV: group, consumer, lease ms, number of info fields and values, those, then the epoch of each request
-- Returns for each request: ok | fenced | expired | aborted:<reason>
local group, consumer, lease, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local lanes = { rt = KEYS[4], std = KEYS[5], bulk = KEYS[6] }
local now = now_ms()
redis.call('HSET', KEYS[1], 'beat', now, unpack(ARGV, 5, 4 + count))
redis.call('PEXPIRE', KEYS[1], lease)
redis.call('ZADD', KEYS[2], now, consumer)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - 10 * lease)
redis.call('PEXPIRE', KEYS[2], 10 * lease)
redis.call('ZADD', KEYS[3], 'XX', now + lease, consumer)
redis.call('PEXPIRE', KEYS[3], lease)

-- Whoever comes back was not killed: a frozen process or a cut network is no evidence against what it ran.
local function acquit(key)
  local request = fetch(key, 'st', 'att', 'lost', 'sus')
  local name = consumer .. ' '
  local at = request.lost and not TERMINAL[request.st] and string.find(request.lost, name, 1, true)
  if not at then return end
  redis.call('HSET', key, 'lost', string.sub(request.lost, 1, at - 1) .. string.sub(request.lost, at + #name))
  if redis.call('HINCRBY', key, 'att', -1) < 2 then redis.call('HDEL', key, 'sus') end
end

local answers = {}
for i = 7, #KEYS, 2 do
  local slot = (i - 7) / 2
  local request = fetch(KEYS[i], 'st', 'ep', 'own', 'eid', 'lane', 'dl')
  local readable = entry_id(request.eid) and lanes[request.lane or ''] and tonumber(request.dl)
  if not readable or not owned(request, ARGV[5 + count + slot], consumer) then
    answers[slot + 1] = 'fenced'
    acquit(KEYS[i])
  else
    foreign(redis.pcall('XCLAIM', lanes[request.lane], group, consumer, 0, request.eid, 'JUSTID'))
    local reason = redis.pcall('GET', KEYS[i + 1])
    if not foreign(reason) and type(reason) == 'string' then
      answers[slot + 1] = 'aborted:' .. reason
    elseif now > tonumber(request.dl) then
      answers[slot + 1] = 'expired'
    else
      answers[slot + 1] = 'ok'
    end
  end
end
return answers
