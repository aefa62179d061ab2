-- A webhook that is due, or was given up, is kept for so long after it was last touched.
local HOOK_LIFE = 604800000

-- Have a receiver told of an end, from now on. `prefix` is that of the names, `to` and `event` are kept as they are.
local function record_hook(prefix, id, to, event, now)
  local hook, due = prefix .. 'hook:' .. id, prefix .. 'hooks'
  -- Somebody else's key under one of these names costs the message, not the end of the request.
  if foreign(redis.pcall('ZADD', due, now, id)) then return end
  if foreign(redis.pcall('HSET', hook, 'to', to, 'end', event, 't', now, 'n', 0)) then return end
  redis.call('PEXPIRE', hook, HOOK_LIFE)
  redis.call('PEXPIRE', due, HOOK_LIFE)
end
