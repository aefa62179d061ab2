local TERMINAL = { done = true, failed = true, aborted = true, expired = true, dead = true }

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function fetch(key, ...)
  local values = redis.call('HMGET', key, ...)
  local request = {}
  for i, name in ipairs({ ... }) do request[name] = values[i] or nil end
  return request
end

-- The id `<seq>-0` makes a second append of one seq an error, and a hole visible to every reader.
local function append(log, channel, seq, kind, event, epoch, cap)
  redis.call('XADD', log, 'MAXLEN', '~', cap, seq .. '-0', 't', kind, 'd', event, 'ep', epoch)
  redis.call('PUBLISH', channel, event)
end

-- The fence of every write of a worker. The owner counts too: a server that crashed and lost its last second may hand
-- out one epoch twice.
local function owned(request, epoch, owner)
  return request.st == 'running' and request.ep == epoch and request.own == owner
end
