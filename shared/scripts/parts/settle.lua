local COUNTS = { 'ep', 'att', 'seq', 'nb', 'nt', 'nfe', 'pt', 'dl', 'qd', 't0', 'cap', 'ret' }

-- False for a hash of a request that these scripts cannot have written.
local function sound(request, lane)
  for _, name in ipairs(COUNTS) do
    if not countable(request[name]) then return false end
  end
  return (request.st == 'queued' or (request.st == 'running' and request.own ~= nil)) and request['in'] ~= nil
    and entry_id(request.eid) and request.lane ~= nil and string.match(lane, ':q:([^:]*)$') == request.lane and request.seq ~= '0'
end

-- How fast a partition ends requests, for an honest Retry-After: `n` ends since `t`, and the rate of the last window.
-- Where nothing waits, the pace is that of who asks, not what the workers can do: a lane that has emptied tells nothing.
local function count_end(rate, lane, now)
  if redis.pcall('XLEN', lane) == 0 then
    redis.call('DEL', rate)
    return
  end
  local window = redis.call('HMGET', rate, 't', 'n')
  local began, ended = tonumber(window[1]), tonumber(window[2])
  if not began then
    redis.call('HSET', rate, 't', now, 'n', 1)
  elseif now - began > 10000 then
    redis.call('HSET', rate, 't', now, 'n', 1, 'r', ended * 1000 / (now - began))
  else
    redis.call('HINCRBY', rate, 'n', 1)
  end
  redis.call('PEXPIRE', rate, 60000)
end

-- The one way a request ends: terminal event, state, acknowledgement and retention together.
-- names: request, log, channel, lane, rate. request: eid, cap, ret.
local function settle(names, group, request, seq, epoch, state, kind, event)
  local now = now_ms()
  append(names.log, names.channel, seq, kind, event, epoch, request.cap)
  redis.call('HSET', names.request, 'st', state, 'seq', seq, 'ep', epoch, 't1', now)
  -- A dead letter keeps its command, to be read and replayed.
  if state ~= 'dead' then redis.call('HDEL', names.request, 'in') end
  local more = redis.call('HMGET', names.request, 'ten', 'hook')
  local tenant, hook = more[1], more[2]
  if tenant or hook then
    local prefix, id = string.match(names.request, '^(.*:)r:([^:]+)$')
    if tenant then redis.call('ZREM', prefix .. 't:' .. tenant, id) end
    if hook then
      record_hook(prefix, id, hook, event, now)
      redis.call('HDEL', names.request, 'hook')
    end
  end
  if request.eid then
    if not foreign(redis.pcall('XACK', names.lane, group, request.eid)) then
      redis.call('XDEL', names.lane, request.eid)
    end
  end
  redis.call('PEXPIRE', names.request, request.ret)
  redis.call('PEXPIRE', names.log, request.ret)
  count_end(names.rate, names.lane, now)
end

-- Events that no worker is left to write. cjson cannot write an empty array, and none is needed here.
local function aborted_event(id, seq, epoch, request)
  return cjson.encode({
    t = 'finished', id = id, seq = seq, epoch = epoch, reason = 'aborted', detail = 'aborted',
    usage = {
      prompt_tokens = tonumber(request.pt or 0), completion_tokens = tonumber(request.nt or 0),
      nfe = tonumber(request.nfe or 0), blocks = tonumber(request.nb or 0),
    },
  })
end

local function failed_event(id, seq, epoch, code, message)
  return cjson.encode({ t = 'failed', id = id, seq = seq, epoch = epoch, code = code, message = message })
end
