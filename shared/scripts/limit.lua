#!lua flags=allow-oom
-- Two rate limits as one decision: GCRA (generic cell rate algorithm) over requests and over tokens.
-- A limit of n a minute lets n through at once and refills evenly; its key holds the time at which it is full again.
-- Negative costs give back. A key is charged only if both limits allow it.
-- KEYS: requests, tokens
-- ARGV: requests a minute (0 = no limit), tokens a minute (0 = no limit), requests, tokens
-- Returns {allowed (0 | 1), ms until it would be (-1 = never), requests left, ms until full, tokens left, ms until full}
local WINDOW = 60000
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local wait, reply = 0, {}
local after = {}
for i = 1, 2 do
  local limit, cost = tonumber(ARGV[i]), tonumber(ARGV[i + 2])
  if limit > 0 then
    local full = math.max(now, tonumber(redis.call('GET', KEYS[i]) or '0'))
    local charged = math.max(now, full + cost * WINDOW / limit)
    after[i] = { full, charged }
    if cost > limit then
      wait = -1
    elseif cost > 0 and wait >= 0 then
      wait = math.max(wait, charged - now - WINDOW)
    end
  end
end
local allowed = wait == 0
for i = 1, 2 do
  local limit = tonumber(ARGV[i])
  if after[i] then
    local full = allowed and after[i][2] or after[i][1]
    if allowed and full > now then
      redis.call('SET', KEYS[i], string.format('%.3f', full), 'PX', math.ceil(full - now) + 1000)
    elseif allowed then
      redis.call('DEL', KEYS[i])
    end
    reply[#reply + 1] = math.max(0, math.floor((WINDOW - (full - now)) * limit / WINDOW + 0.000001))
    reply[#reply + 1] = math.ceil(full - now)
  else
    reply[#reply + 1] = -1
    reply[#reply + 1] = 0
  end
end
return { allowed and 1 or 0, math.ceil(wait), reply[1], reply[2], reply[3], reply[4] }
