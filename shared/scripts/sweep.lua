#!lua flags=allow-oom
-- Look through a part of a lane for what nobody may ever look at again: a pool without workers claims nothing.
-- KEYS: lane
-- ARGV: group, prefix, first id, count, grace ms
-- Returns {entries seen, last id, entries dropped because their request is gone, {ids of requests past their deadline}}
local now, dropped, late, last = now_ms(), 0, {}, ''
local entries = redis.pcall('XRANGE', KEYS[1], ARGV[3], '+', 'COUNT', ARGV[4])
if foreign(entries) then return { 0, '', 0, {} } end
for _, entry in ipairs(entries) do
  last = entry[1]
  -- An entry that no submit has written is left to the workers, who count what they drop.
  local id = entry[2][1] == 'id' and entry[2][2]
  local key = id and ARGV[2] .. 'r:' .. id
  if id and redis.call('EXISTS', key) == 0 then
    redis.call('XACK', KEYS[1], ARGV[1], last)
    redis.call('XDEL', KEYS[1], last)
    dropped = dropped + 1
  elseif id then
    local request = fetch(key, 'st', 'ep', 'dl', 'qd')
    local deadline, queue = tonumber(request.dl), tonumber(request.qd)
    if deadline and queue and not TERMINAL[request.st] then
      if request.st == 'running' then
        deadline = deadline + ARGV[5]
      elseif request.ep == '0' then
        deadline = math.min(deadline, queue)
      end
      if now > deadline then late[#late + 1] = id end
    end
  end
end
return { #entries, last, dropped, late }
