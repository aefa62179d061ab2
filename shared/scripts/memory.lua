#!lua flags=no-writes
-- How full the server of a partition is. A script, so that in a Cluster it runs on the node of its key.
-- KEYS: any key of the partition
-- Returns {bytes used, bytes allowed (0 = no limit)}
local info = redis.call('INFO', 'memory')
return { tonumber(string.match(info, 'used_memory:(%d+)')), tonumber(string.match(info, 'maxmemory:(%d+)')) }
