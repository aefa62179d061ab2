local TERMINAL = { done = true, failed = true, aborted = true, expired = true, dead = true }

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- True if a key under a name of ours holds somebody else's type. Any other error, such as a right that this user lacks,
-- is no fault of the request: it ends the script, and nothing is dropped for it.
local function foreign(reply)
  if type(reply) ~= 'table' or not reply.err then return false end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then error(reply) end
  return true
end

local function fetch(key, ...)
  local values = redis.pcall('HMGET', key, ...)
  -- Somebody else's key is as good as none.
  if foreign(values) then return {} end
  local request = {}
  for i, name in ipairs({ ... }) do request[name] = values[i] or nil end
  return request
end

-- The id `<seq>-0` makes a second append of one seq an error, and a hole visible to every reader.
local function append(log, channel, seq, kind, event, epoch, cap)
  redis.call('XADD', log, 'MAXLEN', '~', cap, seq .. '-0', 't', kind, 'd', event, 'ep', epoch)
  redis.call('PUBLISH', channel, event)
end

-- False for what is no entry's id: commands would refuse it with an error.
local function entry_id(text)
  return text ~= nil and #text <= 40 and string.match(text, '^%d+%-%d+$') ~= nil
end

-- True for a count that commands take: up to 13 digits, as many as milliseconds have. From 1e14 on Lua writes a number with
-- an exponent, which no stream takes for an id, and what is counted on from here stays below.
local function countable(text)
  return text and #text <= 13 and string.match(text, '^%d+$') ~= nil
end

-- The fence of every write of a worker. The owner counts too: a server that crashed and lost its last second may hand
-- out one epoch twice.
local function owned(request, epoch, owner)
  return request.st == 'running' and request.ep == epoch and request.own == owner
end
