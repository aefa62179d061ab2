#!lua
-- Delete the lanes of a partition and its dead letters, unless an entry waits in a lane.
-- KEYS: lanes rt, std, bulk, dead letters
for i = 1, 3 do
  if redis.call('XLEN', KEYS[i]) > 0 then return 0 end
end
redis.call('DEL', unpack(KEYS))
return 1
