#!lua flags=allow-oom
-- Claim up to `budget` requests: what others lost first, then new ones, lane after lane. One script, because COUNT of
-- XREADGROUP is per stream and would claim more than there are free slots.
--
-- A crash hits all requests of a worker, and only one of them may be its cause. A first crash is forgiven: machines
-- fail, and whoever has room goes on at once. What has lost two workers is suspect: one worker at a time, the officer,
-- runs suspects by themselves, in groups that are halved with each crash, until the culprit has crashed a worker alone.
-- The officer takes nothing else; the others leave suspects to it.
-- KEYS: three lanes in reading order, dlq, handed-back hint, rate, probation
-- ARGV: prefix, group, consumer, budget, lease ms, reap (0 | 1), max attempts, envelope version, slots, requests held,
--       three scan cursors
-- Names of single requests derive from the prefix (same hash tag): they are known only after the read.
-- Returns {claims, cursors, officer (0 | 1), malformed entries dropped}
local worker = {
  prefix = ARGV[1], group = ARGV[2], name = ARGV[3], lease = tonumber(ARGV[5]),
  max_attempts = tonumber(ARGV[7]), version = tonumber(ARGV[8]), dlq = KEYS[4], rate = KEYS[6],
  dropped = 0,
}
local left, slots, held = tonumber(ARGV[4]), tonumber(ARGV[9]), tonumber(ARGV[10])
local claims, cursors = {}, { ARGV[11], ARGV[12], ARGV[13] }
local HANDED_BACK = 43200000

local officer = redis.call('GET', KEYS[7])
local mine = officer == worker.name
if mine and held > 0 then return { claims, cursors, 1, worker.dropped } end

local function claim(lane, entry, alone)
  -- A deleted entry comes without fields; XAUTOCLAIM has then dropped it from the pending list already.
  local claimed = entry[2] and open_entry(worker, lane, entry, alone)
  if claimed then
    claims[#claims + 1] = claimed
    left = left - 1
  end
end

local suspects = {}

-- An entry whose lease is over, now ours: a suspect if it has lost enough workers, else a claim.
local function receive(lane, entry)
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
  if readable and request.sus and not TERMINAL[request.st] then
    suspects[#suspects + 1] = { lane = lane, entry = entry, attempts = tonumber(request.att) }
  else
    claim(lane, entry)
  end
end

local function put_back(suspect)
  redis.call('XCLAIM', suspect.lane, worker.group, worker.name, 0, suspect.entry[1], 'IDLE', worker.lease, 'JUSTID')
end

local hinted, reap = redis.call('EXISTS', KEYS[5]) == 1, mine or ARGV[6] == '1'
local all_seen = false
if left > 0 and (hinted or reap) then
  all_seen = true
  for i = 1, 3 do
    if hinted or mine then cursors[i] = '0-0' end
    -- One XAUTOCLAIM looks at 10 x COUNT entries: go on in slices, and next time from where this one stopped.
    for _ = 1, 40 do
      if left == 0 then break end
      local idle = reap and worker.lease or HANDED_BACK
      local reply = redis.pcall('XAUTOCLAIM', KEYS[i], worker.group, worker.name, idle, cursors[i], 'COUNT', left)
      -- Somebody else's key under a lane's name stops neither this worker nor the other lanes.
      if foreign(reply) then break end
      cursors[i] = reply[1]
      for _, entry in ipairs(reply[2]) do receive(KEYS[i], entry) end
      if cursors[i] == '0-0' then break end
    end
    if left == 0 or cursors[i] ~= '0-0' then all_seen = false end
  end
  if hinted and all_seen then redis.call('DEL', KEYS[5]) end
end

if #suspects > 0 and (mine or not officer) then
  mine = true
  redis.call('SET', KEYS[7], worker.name, 'PX', worker.lease)
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
  for i = first, #suspects do put_back(suspects[i]) end
  if #claims > 0 or held > 0 then return { claims, cursors, 1, worker.dropped } end
end
for _, suspect in ipairs(mine and {} or suspects) do put_back(suspect) end
if mine then
  if not all_seen then return { claims, cursors, 1, worker.dropped } end
  redis.call('DEL', KEYS[7])
end

for i = 1, 3 do
  for _ = 1, 16 do
    if left == 0 then break end
    local reply = redis.pcall('XREADGROUP', 'GROUP', worker.group, worker.name, 'COUNT', left, 'STREAMS', KEYS[i], '>')
    if foreign(reply) or not (reply and reply[1]) then break end
    for _, entry in ipairs(reply[1][2]) do claim(KEYS[i], entry) end
  end
end
return { claims, cursors, 0, worker.dropped }
