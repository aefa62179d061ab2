#!lua flags=allow-oom
-- Move a stored object from one of some states to another, with fields that belong to the move.
-- KEYS: hash
-- ARGV: number of allowed states, the states, new state, field, value, ...
-- Returns {moved (0 | 1), state} or {} if there is no such object
local state = redis.call('HGET', KEYS[1], 'status')
if not state then return {} end
local count = tonumber(ARGV[1])
for i = 2, count + 1 do
  if ARGV[i] == state then
    redis.call('HSET', KEYS[1], 'status', unpack(ARGV, count + 2))
    return { 1, ARGV[count + 2] }
  end
end
return { 0, state }
