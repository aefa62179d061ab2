-- Turn an entry that this consumer holds into a claim, or end it here. Returns the claim, or nil.
-- worker: prefix, group, name, max_attempts, dlq, rate.
local function start(worker, lane, eid, id)
  local prefix = worker.prefix
  local names = {
    request = prefix .. 'r:' .. id, log = prefix .. 'e:' .. id, channel = prefix .. 'c:' .. id,
    lane = lane, rate = worker.rate,
  }
  local request = fetch(
    names.request, 'st', 'eid', 'ep', 'att', 'seq', 'nb', 'nt', 'nfe', 'pt', 'dl', 'qd', 'in', 't0', 'cap', 'ret')
  if not request.st or request.eid ~= eid or TERMINAL[request.st] then
    -- Retention is over, the id was re-queued under another entry, or a failover brought an acknowledged one back.
    redis.call('XACK', lane, worker.group, eid)
    redis.call('XDEL', lane, eid)
    return nil
  end
  local now = now_ms()
  local epoch, seq, attempts = tonumber(request.ep), tonumber(request.seq), tonumber(request.att)
  if redis.call('EXISTS', prefix .. 'a:' .. id) == 1 then
    settle(names, worker.group, request, seq + 1, epoch + 1, 'aborted', 'finished',
      aborted_event(id, seq + 1, epoch + 1, request))
    return nil
  end
  if now > tonumber(request.dl) or (epoch == 0 and now > tonumber(request.qd)) then
    local message = epoch == 0 and 'the deadline passed before a worker was free' or 'the deadline passed'
    settle(names, worker.group, request, seq + 1, epoch + 1, 'expired', 'failed',
      failed_event(id, seq + 1, epoch + 1, 'expired', message))
    return nil
  end
  if attempts >= worker.max_attempts then
    redis.call('XADD', worker.dlq, 'MAXLEN', '~', 10000, '*', 'id', id, 'att', attempts, 'why', 'attempts')
    settle(names, worker.group, request, seq + 1, epoch + 1, 'dead', 'failed',
      failed_event(id, seq + 1, epoch + 1, 'poison', 'gave up after ' .. attempts .. ' workers lost it'))
    return nil
  end
  redis.call('HSET', names.request, 'st', 'running', 'own', worker.name, 'ep', epoch + 1, 'att', attempts + 1)
  local events = {}
  if seq > 1 then
    for _, entry in ipairs(redis.call('XRANGE', names.log, '2-0', '+')) do
      events[#events + 1] = entry[2][4]
    end
  end
  return { id, epoch + 1, attempts + 1, request['in'], tonumber(request.nb), seq, now - tonumber(request.t0), events }
end

-- An entry is id, v, cost; an envelope newer than `worker.version` is left for a newer worker, its age kept.
local function open_entry(worker, lane, entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  if tonumber(fields.v or 1) > worker.version then
    local idle = math.max(0, worker.lease - 5000)
    redis.call('XCLAIM', lane, worker.group, worker.name, 0, entry[1], 'IDLE', idle, 'JUSTID')
    return nil
  end
  return start(worker, lane, entry[1], fields.id)
end
