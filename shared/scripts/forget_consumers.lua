#!lua flags=allow-oom
-- Remove consumers that hold nothing. The check and the removal are one script: XGROUP DELCONSUMER of a consumer with
-- pending entries loses them for ever.
-- KEYS: lanes
-- ARGV: group, name of the only one to remove or '', name of one to keep, least idle ms
-- Returns how many were removed
local removed = 0
for _, lane in ipairs(KEYS) do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', lane, ARGV[1])
  for _, flat in ipairs(consumers.err and {} or consumers) do
    local consumer = {}
    for i = 1, #flat, 2 do consumer[flat[i]] = flat[i + 1] end
    local wanted = ARGV[2] == '' or ARGV[2] == consumer.name
    if wanted and consumer.name ~= ARGV[3] and consumer.pending == 0 and consumer.idle >= tonumber(ARGV[4]) then
      redis.call('XGROUP', 'DELCONSUMER', lane, ARGV[1], consumer.name)
      removed = removed + 1
    end
  end
end
return removed
