#!lua flags=allow-oom
-- Claim up to `budget` requests: what others lost first, then new ones, lane after lane. One script, because COUNT of
-- XREADGROUP is per stream and would claim more than there are free slots.
-- KEYS: three lanes in reading order, dlq, handed-back hint, rate
-- ARGV: prefix, group, consumer, budget, lease ms, reap (0 | 1), max attempts, envelope version, three scan cursors
-- Names of single requests derive from the prefix (same hash tag): they are known only after the read.
-- Returns {claims, cursors}
local worker = {
  prefix = ARGV[1], group = ARGV[2], name = ARGV[3], lease = tonumber(ARGV[5]),
  max_attempts = tonumber(ARGV[7]), version = tonumber(ARGV[8]), dlq = KEYS[4], rate = KEYS[6],
}
local left = tonumber(ARGV[4])
local claims, cursors = {}, { ARGV[9], ARGV[10], ARGV[11] }

local function claim(lane, entry)
  -- A deleted entry comes without fields; XAUTOCLAIM has then dropped it from the pending list already.
  local claimed = entry[2] and open_entry(worker, lane, entry)
  if claimed then
    claims[#claims + 1] = claimed
    left = left - 1
  end
end

local hinted = redis.call('EXISTS', KEYS[5]) == 1
if left > 0 and (hinted or ARGV[6] == '1') then
  local all_seen = true
  for i = 1, 3 do
    if hinted then cursors[i] = '0-0' end
    -- One XAUTOCLAIM looks at 10 x COUNT entries: go on in slices, and next time from where this one stopped.
    for _ = 1, 40 do
      if left == 0 then break end
      local reply = redis.call('XAUTOCLAIM', KEYS[i], worker.group, worker.name, worker.lease, cursors[i], 'COUNT', left)
      cursors[i] = reply[1]
      for _, entry in ipairs(reply[2]) do claim(KEYS[i], entry) end
      if cursors[i] == '0-0' then break end
    end
    if left == 0 or cursors[i] ~= '0-0' then all_seen = false end
  end
  if hinted and all_seen then redis.call('DEL', KEYS[5]) end
end

for i = 1, 3 do
  for _ = 1, 16 do
    if left == 0 then break end
    local reply = redis.call('XREADGROUP', 'GROUP', worker.group, worker.name, 'COUNT', left, 'STREAMS', KEYS[i], '>')
    if not (reply and reply[1]) then break end
    for _, entry in ipairs(reply[1][2]) do claim(KEYS[i], entry) end
  end
end
return { claims, cursors }
