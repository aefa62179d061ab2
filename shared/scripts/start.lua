#!lua flags=allow-oom
-- Start entries that a blocking read has delivered to this consumer; give back those over the budget.
-- KEYS: dlq, handed-back hint, rate, then the lane of each entry
-- ARGV: prefix, group, consumer, budget, lease ms, max attempts, envelope version, then for each entry: entry id,
--       request id, its envelope version
-- Returns {claims, malformed entries dropped}
local worker = {
  prefix = ARGV[1], group = ARGV[2], name = ARGV[3], lease = tonumber(ARGV[5]),
  max_attempts = tonumber(ARGV[6]), version = tonumber(ARGV[7]), dlq = KEYS[1], rate = KEYS[3],
  dropped = 0,
}
local left = tonumber(ARGV[4])
local claims = {}
for i = 4, #KEYS do
  local at = 8 + (i - 4) * 3
  local eid = ARGV[at]
  if left == 0 then
    redis.call('XCLAIM', KEYS[i], worker.group, worker.name, 0, eid, 'IDLE', 86400000, 'JUSTID')
    redis.call('SET', KEYS[2], 1, 'PX', worker.lease)
  -- A slow reply may reach us after the lease: then the entry is somebody else's by now, and this read is void.
  elseif #redis.call('XPENDING', KEYS[i], worker.group, eid, eid, 1, worker.name) == 1 then
    local claimed = open_entry(worker, KEYS[i], { eid, { 'id', ARGV[at + 1], 'v', ARGV[at + 2] } })
    if claimed then
      claims[#claims + 1] = claimed
      left = left - 1
    end
  end
end
return { claims, worker.dropped }
