#!lua flags=allow-oom
-- Take webhooks that are due. Each is due again after the lease: whoever dies with one in hand loses none. The try
-- counts from here on, and its number fences what the taker says later.
-- KEYS: webhooks due
-- ARGV: prefix, most, lease ms
-- Returns {id, to, what is told, time of the end, number of the try} of each
local now = now_ms()
local due = redis.pcall('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[2])
if foreign(due) then return {} end
local taken = {}
for _, id in ipairs(due) do
  local key = ARGV[1] .. 'hook:' .. id
  local hook = fetch(key, 'to', 'end', 't', 'n')
  if hook.to and hook['end'] and countable(hook.t) and countable(hook.n) then
    redis.call('ZADD', KEYS[1], now + ARGV[3], id)
    taken[#taken + 1] = { id, hook.to, hook['end'], tonumber(hook.t), redis.call('HINCRBY', key, 'n', 1) }
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return taken
