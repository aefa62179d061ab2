#!lua flags=allow-oom
-- Claim up to `budget` requests: what others lost first, then new ones, lane after lane. One script, because COUNT of
-- XREADGROUP is per stream and would claim more than there are free slots.
--
-- A crash hits all requests of a worker, and only one of them may be its cause. A first crash is forgiven: machines
-- fail, and whoever has room goes on at once. What has lost two workers is suspect: an officer runs suspects by
-- themselves, in groups that are halved with each crash, until the culprit has crashed a worker alone. It takes nothing
-- else meanwhile, and the others leave suspects to the officers: one of them, or half of the fleet while many wait.
-- Whoever becomes one gives back what it runs, at the next block of each, if the rest can go on with it.
-- KEYS: three lanes in reading order, dlq, handed-back hint, rate, officers, workers
-- ARGV: prefix, group, consumer, budget, lease ms, reap (0 | 1), max attempts, envelope version, slots, requests held,
--       three scan cursors, as officer: are there requests that it could give back (0 | 1)
-- Names of single requests derive from the prefix (same hash tag): they are known only after the read.
-- Returns {claims, cursors, officer (0 | 1 | 2: give back what you run), malformed entries dropped, live workers}
local worker = {
  prefix = ARGV[1], group = ARGV[2], name = ARGV[3], lease = tonumber(ARGV[5]),
  max_attempts = tonumber(ARGV[7]), version = tonumber(ARGV[8]), dlq = KEYS[4], rate = KEYS[6],
  dropped = 0,
}
local left, slots, held = tonumber(ARGV[4]), tonumber(ARGV[9]), tonumber(ARGV[10])
local claims, cursors = {}, { ARGV[11], ARGV[12], ARGV[13] }
local HANDED_BACK = 43200000

local now = now_ms()
local officers, names = {}, redis.call('ZRANGE', KEYS[7], 0, -1)
if #names > 0 and redis.call('ZREMRANGEBYSCORE', KEYS[7], '-inf', now) > 0 then
  names = redis.call('ZRANGE', KEYS[7], 0, -1)
end
for _, name in ipairs(names) do officers[name] = true end
local mine = officers[worker.name]

-- How many workers beside this one take what comes, and the free slots that they had at their last beat.
local function fleet()
  local ready, free = 0, 0
  local all = redis.pcall('ZRANGE', KEYS[8], 0, -1)
  if foreign(all) then return ready, free end
  for _, name in ipairs(all) do
    local other = name ~= worker.name and not officers[name] and fetch(worker.prefix .. 'w:' .. name, 'state', 'free')
    if other and other.state == 'ready' then
      ready = ready + 1
      free = free + (tonumber(other.free) or 0)
    end
  end
  return ready, free
end

-- True if the rest can go on with what this worker runs: at once, or soon, for what comes back goes before what is new.
local function dispensable(ready, free)
  return held > 0 and (ready > 1 or (ready == 1 and free >= held))
end

if mine and held > 0 then
  local give_back = ARGV[14] == '1' and dispensable(fleet())
  return { claims, cursors, give_back and 2 or 1, worker.dropped, redis.call('ZCARD', KEYS[8]) }
end

local function claim(lane, entry, alone)
  local claimed = entry[2] and open_entry(worker, lane, entry, alone)
  if claimed then
    claims[#claims + 1] = claimed
    left = left - 1
  end
end

local suspects, others = {}, {}

-- An entry whose lease is over or that was handed back, now ours: a suspect if it has lost enough workers.
local function receive(lane, entry)
  -- A deleted entry comes without fields; XAUTOCLAIM has then dropped it from the pending list already.
  if not entry[2] then return end
  local id = read_entry(worker, entry)
  -- What is malformed falls through to `claim`, which drops it.
  local key = worker.prefix .. 'r:' .. (id or '')
  local request = fetch(key, 'st', 'eid', 'own', 'att', 'sus')
  local readable = request.own and tonumber(request.att)
  if readable and request.st == 'running' and request.eid == entry[1] and not request.sus then
    if redis.call('EXISTS', worker.prefix .. 'w:' .. request.own) == 1 then
      -- Its owner lives and never knew of it, for the reply of its claim was lost: no attempt at all.
      redis.call('HSET', key, 'st', 'queued', 'own', '', 'att', request.att - 1)
    elseif tonumber(request.att) > 1 then
      redis.call('HSET', key, 'sus', 1)
      request.sus = '1'
    end
  end
  local found = { lane = lane, entry = entry, attempts = tonumber(request.att) }
  if readable and request.sus and not TERMINAL[request.st] then
    suspects[#suspects + 1] = found
  else
    others[#others + 1] = found
  end
end

local function put_back(found, idle)
  redis.call('XCLAIM', found.lane, worker.group, worker.name, 0, found.entry[1], 'IDLE', idle, 'JUSTID')
end

local hinted = redis.call('EXISTS', KEYS[5]) == 1
local reap = mine or ARGV[6] == '1'
if left > 0 and (hinted or reap) then
  local all_seen = true
  for i = 1, 3 do
    if hinted then cursors[i] = '0-0' end
    -- One XAUTOCLAIM looks at 10 x COUNT entries: go on in slices, and next time from where this one stopped.
    for _ = 1, 40 do
      local wanted = left - #others
      if wanted == 0 then break end
      local idle = reap and worker.lease or HANDED_BACK
      local reply = redis.pcall('XAUTOCLAIM', KEYS[i], worker.group, worker.name, idle, cursors[i], 'COUNT', wanted)
      -- Somebody else's key under a lane's name stops neither this worker nor the other lanes.
      if foreign(reply) then break end
      cursors[i] = reply[1]
      for _, entry in ipairs(reply[2]) do receive(KEYS[i], entry) end
      if cursors[i] == '0-0' then break end
    end
    if left == #others or cursors[i] ~= '0-0' then all_seen = false end
  end
  if hinted and all_seen then redis.call('DEL', KEYS[5]) end
end

local give_back = false

-- True if this worker is to run suspects.
local function serves()
  if mine and held == 0 then return true end
  local ready, free = fleet()
  give_back = dispensable(ready, free)
  return #names == 0 or (ready >= #names and (held == 0 or give_back))
end

if #suspects > 0 and serves() then
  mine = true
  redis.call('ZADD', KEYS[7], now + worker.lease, worker.name)
  redis.call('PEXPIRE', KEYS[7], worker.lease)
  -- The least suspect first: most of them are innocent, and soon out of the way.
  table.sort(suspects, function(a, b) return a.attempts < b.attempts end)
  local first = 1
  while first <= #suspects and held == 0 and #claims == 0 do
    local last = first
    local function room(i) return math.max(1, math.floor(slots / 2 ^ (suspects[i].attempts - 1))) end
    while last < #suspects and last - first + 1 < math.min(room(last + 1), left) do last = last + 1 end
    for i = first, last do claim(suspects[i].lane, suspects[i].entry, first == last) end
    first = last + 1
  end
  for i = first, #suspects do put_back(suspects[i], worker.lease) end
  if held > 0 or #claims > 0 then
    for _, other in ipairs(others) do put_back(other, 2 * HANDED_BACK) end
    if #others > 0 then redis.call('SET', KEYS[5], 1, 'PX', worker.lease) end
    return { claims, cursors, give_back and 2 or 1, worker.dropped, redis.call('ZCARD', KEYS[8]) }
  end
else
  for _, suspect in ipairs(suspects) do put_back(suspect, worker.lease) end
end
if mine then redis.call('ZREM', KEYS[7], worker.name) end
for _, other in ipairs(others) do claim(other.lane, other.entry) end

for i = 1, 3 do
  for _ = 1, 16 do
    if left == 0 then break end
    local reply = redis.pcall('XREADGROUP', 'GROUP', worker.group, worker.name, 'COUNT', left, 'STREAMS', KEYS[i], '>')
    if foreign(reply) or not (reply and reply[1]) then break end
    for _, entry in ipairs(reply[1][2]) do claim(KEYS[i], entry) end
  end
end
return { claims, cursors, 0, worker.dropped, redis.call('ZCARD', KEYS[8]) }
