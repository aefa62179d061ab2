#!lua flags=no-writes
-- State and log of a request as of one moment.
-- KEYS: request, log
-- ARGV: first seq, count
-- Returns {} if unknown, else {state, last seq, deadline passed (0 | 1), {seq, event, seq, event, ...}, model's other name}
local request = fetch(KEYS[1], 'st', 'seq', 'ep', 'dl', 'qd', 'name')
local deadline = tonumber(request.dl)
if not (request.st and deadline and tonumber(request.qd) and tonumber(request.seq)) then return {} end
if request.st == 'queued' and request.ep == '0' then deadline = math.min(deadline, tonumber(request.qd)) end
local late = not TERMINAL[request.st] and now_ms() > deadline
local events = {}
local first, count = tonumber(ARGV[1]), tonumber(ARGV[2])
if count > 0 and first <= 1 then
  -- No submit writes it, see there.
  events = { 1, '{"t":"queued","id":"' .. string.match(KEYS[1], ':r:([^:]+)$') .. '","seq":1,"epoch":0}' }
  first, count = 2, count - 1
end
if count > 0 then
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], first .. '-0', '+', 'COUNT', count)) do
    events[#events + 1] = tonumber(string.match(entry[1], '^%d+'))
    events[#events + 1] = entry[2][4]
  end
end
return { request.st, tonumber(request.seq), late and 1 or 0, events, request.name or '' }
