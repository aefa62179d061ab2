-- A request that has crashed a worker while it ran alone, in its last of enough attempts. What can be read later: who
-- was lost, and the command itself, for a week.
local function bury(worker, names, request, id, seq, epoch)
  local message = 'gave up: the ' .. request.att .. ' workers that ran it were lost, the last one while it ran alone'
  request.ret = math.max(tonumber(request.ret), 604800000)
  settle(names, worker.group, request, seq, epoch, 'dead', 'failed', failed_event(id, seq, epoch, 'poison', message))
  redis.call('XADD', worker.dlq, 'MAXLEN', '~', 10000, '*', 'id', id, 'att', request.att, 'why', 'alone',
    'lost', (request.lost or '') .. request.own)
end

-- Remove what no script of ours has written: left alone it would stop worker after worker. Of a request only the log
-- stays: its followers are told that it is lost.
local function drop(worker, lane, eid, request_key)
  worker.dropped = worker.dropped + 1
  redis.call('XACK', lane, worker.group, eid)
  redis.call('XDEL', lane, eid)
  if request_key then redis.call('DEL', request_key) end
end

-- Turn an entry that this consumer holds into a claim, or end it here. Returns the claim, or nil.
-- worker: prefix, group, name, max_attempts, dlq, rate. alone: nothing else runs beside it.
local function start(worker, lane, eid, id, alone)
  local prefix = worker.prefix
  local names = {
    request = prefix .. 'r:' .. id, log = prefix .. 'e:' .. id, channel = prefix .. 'c:' .. id,
    lane = lane, rate = worker.rate,
  }
  local request = fetch(
    names.request, 'st', 'eid', 'ep', 'att', 'seq', 'nb', 'nt', 'nfe', 'pt', 'dl', 'qd', 'in', 't0', 'cap', 'ret', 'own',
    'alone', 'lost', 'lane')
  if not request.st or request.eid ~= eid or TERMINAL[request.st] then
    -- Retention is over, the id was re-queued under another entry, or a failover brought an acknowledged one back.
    redis.call('XACK', lane, worker.group, eid)
    redis.call('XDEL', lane, eid)
    return nil
  end
  local newest = redis.pcall('XREVRANGE', names.log, '+', '-', 'COUNT', 1)
  if foreign(newest) or not sound(request, lane)
    or (newest[1] and tonumber(string.match(newest[1][1], '^%d+')) > tonumber(request.seq)) then
    drop(worker, lane, eid, names.request)
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
  if attempts >= worker.max_attempts and request.st == 'running' and request.alone == '1' then
    bury(worker, names, request, id, seq + 1, epoch + 1)
    return nil
  end
  if request.st == 'running' then
    redis.call('HSET', names.request, 'lost', (request.lost or '') .. request.own .. ' ')
  end
  redis.call('HSET', names.request, 'st', 'running', 'own', worker.name, 'ep', epoch + 1, 'att', attempts + 1,
    'alone', alone and 1 or 0)
  local events = {}
  if seq > 1 then
    for _, entry in ipairs(redis.call('XRANGE', names.log, '2-0', '+')) do
      events[#events + 1] = entry[2][4] or ''
    end
  end
  return { id, epoch + 1, attempts + 1, request['in'], tonumber(request.nb), seq, now - tonumber(request.t0), events }
end

-- An entry is the id of a request of this partition, and `v`, the version of its envelope. Returns both, or nil.
local function read_entry(worker, entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local id, version = fields.id or '', fields.v or '1'
  local start = 'r_' .. string.match(worker.prefix, '{(.*)}') .. '_'
  if string.sub(id, 1, #start) ~= start or #id ~= #start + 26
    or not string.match(string.sub(id, #start + 1), '^[0-9A-HJKMNP-TV-Z]+$')
    or #version > 9 or not string.match(version, '^%d+$') then
    return nil
  end
  return id, tonumber(version)
end

-- An envelope newer than `worker.version` is left for a newer worker, its age kept.
local function open_entry(worker, lane, entry, alone)
  local id, version = read_entry(worker, entry)
  if not id then
    drop(worker, lane, entry[1])
    return nil
  end
  if version > worker.version then
    local idle = math.max(0, worker.lease - 5000)
    redis.call('XCLAIM', lane, worker.group, worker.name, 0, entry[1], 'IDLE', idle, 'JUSTID')
    return nil
  end
  return start(worker, lane, entry[1], id, alone)
end
