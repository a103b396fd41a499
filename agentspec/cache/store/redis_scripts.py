"""Define the Lua scripts of RedisStore, each of which is one transaction; redis_store.py describes the keys.

Every entry of a namespace has an id, ``milliseconds-count``, above all ids in the streams that it goes to. The server's
clock gives the milliseconds. The script counts on from the last id where the clock was set back, whichever keys the
server has evicted, so that no append can fail in its middle.
"""

_LIBRARY = """
local tag = ARGV[1]
local log, sessions, usage, tombstones, doomed =
  tag .. 'log', tag .. 'sessions', tag .. 'usage', tag .. 'tombstones', tag .. 'doomed'

local function charge(session, records, bytes, ms)
  local held = redis.call('HGET', sessions, session)
  local r, b, used = string.match(held or '0 0 0', '^(%d+) (%d+) (%d+)$')
  r, b = r + records, b + bytes
  if r <= 0 then
    redis.call('HDEL', sessions, session)
  else
    redis.call('HSET', sessions, session, string.format('%.0f %.0f %.0f', r, math.max(b, 0), ms or used))
  end
  redis.call('HINCRBY', usage, 'records', records)
  redis.call('HINCRBY', usage, 'bytes', string.format('%.0f', bytes))
end

local function forget(session)
  local held = redis.call('HGET', sessions, session)
  if not held then return 0 end
  local r, b = string.match(held, '^(%d+) (%d+)')
  charge(session, -r, -b)
  return tonumber(r)
end

local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000), 0
end

local function above(ms, seq, id)
  local m, s = string.match(id, '^(%d+)-(%d+)$')
  m, s = tonumber(m), tonumber(s)
  if m > ms or (m == ms and s >= seq) then return m, s + 1 end
  return ms, seq
end

local function next_id(streams)
  local ms, seq = clock()
  local last = redis.call('HGET', usage, 'last')
  if last then ms, seq = above(ms, seq, last) end
  for _, key in ipairs(streams) do
    if #redis.call('XRANGE', key, string.format('%.0f-%.0f', ms, seq), '+', 'COUNT', 1) > 0 then
      ms, seq = above(ms, seq, redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1][1])
    end
  end
  return ms, seq
end

local function drop_reference(id, group)
  redis.call('XDEL', log, id)
  if group then
    redis.call('XDEL', tag .. 'g:' .. group, id)
    if redis.call('XLEN', tag .. 'g:' .. group) == 0 then redis.call('DEL', tag .. 'g:' .. group) end
  end
end

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end
"""

APPEND = (
    _LIBRARY
    + """
-- ARGV: tag, writer, batch, milliseconds until the writer's key expires, and until all others do (0: never),
-- bytes that an entry costs beside its payload, session and newest id that are expected ('*': any), then for each
-- entry: session, payload, 1 and a group or 0 and ''. Returns the first id, or '' for a conflict.
local writer, batch, cost = tag .. 'w:' .. ARGV[2], ARGV[3], tonumber(ARGV[6])
local number, first = string.match(redis.call('GET', writer) or '', '^(%d+) (.+)$')
if number == batch then return first end
if ARGV[8] ~= '*' then
  local newest = redis.call('XREVRANGE', tag .. 's:' .. ARGV[7], '+', '-', 'COUNT', 1)
  if (newest[1] and newest[1][1] or '') ~= ARGV[8] then return '' end
end
local streams, seen = {log}, {}
local function note(key)
  if not seen[key] then
    seen[key] = true
    streams[#streams + 1] = key
  end
end
for i = 9, #ARGV, 4 do
  note(tag .. 's:' .. ARGV[i])
  if ARGV[i + 2] == '1' then note(tag .. 'g:' .. ARGV[i + 3]) end
end
local ms, seq = next_id(streams)
first = string.format('%.0f-%.0f', ms, seq)
local id
for i = 9, #ARGV, 4 do
  local session, payload, group = ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1' and ARGV[i + 3]
  id = string.format('%.0f-%.0f', ms, seq)
  seq = seq + 1
  if group then
    redis.call('XADD', log, id, 's', session, 'b', #payload, 'g', group)
    redis.call('XADD', tag .. 'g:' .. group, id, 's', session, 'b', #payload, 'g', group)
  else
    redis.call('XADD', log, id, 's', session, 'b', #payload)
  end
  redis.call('XADD', tag .. 's:' .. session, id, 'p', payload)
  charge(session, 1, #payload + cost, ms)
end
redis.call('HSET', usage, 'last', id)
redis.call('SET', writer, batch .. ' ' .. first, 'PX', ARGV[4])
if ARGV[5] ~= '0' then
  for _, key in ipairs({sessions, usage, tombstones, doomed}) do redis.call('PEXPIRE', key, ARGV[5]) end
  for _, key in ipairs(streams) do redis.call('PEXPIRE', key, ARGV[5]) end
end
return first
"""
)

ERASE = (
    _LIBRARY
    + """
-- ARGV: tag, session, its tombstone ('': none), bytes that an entry costs beside its payload. Sets the session's stream
-- aside for SWEEP. Returns the number of entries erased and the id of the session's tombstone ('': none).
local session, stream = ARGV[2], tag .. 's:' .. ARGV[2]
local removed = redis.call('XLEN', stream)
local marked = redis.call('HGET', tombstones, session)
local ms, seq = next_id({log})
local id = string.format('%.0f-%.0f', ms, seq)
if removed > 0 then
  redis.call('RENAME', stream, tag .. 'd:' .. id)
  redis.call('SADD', doomed, tag .. 'd:' .. id)
end
forget(session)
if ARGV[3] ~= '' and (removed > 0 or not marked) then
  if marked then
    redis.call('XDEL', log, marked)
  else
    redis.call('HINCRBY', usage, 'records', 1)
    redis.call('HINCRBY', usage, 'bytes', #ARGV[3] + ARGV[4])
  end
  redis.call('XADD', log, id, 's', session, 't', ARGV[3])
  redis.call('HSET', tombstones, session, id)
  marked = id
end
redis.call('HSET', usage, 'last', id)
return {removed, marked or ''}
"""
)

SWEEP = (
    _LIBRARY
    + """
-- ARGV: tag, page. Removes a page of what erased sessions left. Returns how many entries it removed.
local key = redis.call('SRANDMEMBER', doomed)
if not key then return 0 end
local page = redis.call('XRANGE', key, '-', '+', 'COUNT', ARGV[2])
for _, entry in ipairs(page) do
  local reference = redis.call('XRANGE', log, entry[1], entry[1])[1]
  drop_reference(entry[1], reference and fields_of(reference).g)
  redis.call('XDEL', key, entry[1])
end
if redis.call('XLEN', key) == 0 then
  redis.call('DEL', key)
  redis.call('SREM', doomed, key)
end
return math.max(#page, 1)
"""
)

TRIM = (
    _LIBRARY
    + """
-- ARGV: tag, bytes that an entry costs beside its payload, most entries, most bytes, milliseconds of the last entry
-- to remove ('+': any). Removes the oldest entries. Returns how many they are and their bytes.
local cost, bytes, count = tonumber(ARGV[2]), 0, 0
for _, entry in ipairs(redis.call('XRANGE', log, '-', ARGV[5], 'COUNT', ARGV[3])) do
  if bytes >= tonumber(ARGV[4]) then break end
  local id, fields = entry[1], fields_of(entry)
  local stream = tag .. 's:' .. fields.s
  if fields.t then
    redis.call('HINCRBY', usage, 'records', -1)
    redis.call('HINCRBY', usage, 'bytes', -(#fields.t + cost))
    redis.call('HDEL', tombstones, fields.s)
  elseif redis.call('XDEL', stream, id) == 1 then
    charge(fields.s, -1, -(fields.b + cost))
    if redis.call('XLEN', stream) == 0 then redis.call('DEL', stream) end
  elseif redis.call('EXISTS', stream) == 0 then
    forget(fields.s)  -- it has expired or was evicted
  end
  drop_reference(id, fields.g)
  bytes = bytes + (fields.b or 0) + cost
  count = count + 1
end
return {count, string.format('%.0f', bytes)}
"""
)

GATHER = """
-- KEYS: one stream for each session; ARGV: first and last id for each. Returns [id, payload, id, payload, ...].
local found = {}
for i, key in ipairs(KEYS) do
  for _, entry in ipairs(redis.call('XRANGE', key, ARGV[2 * i - 1], ARGV[2 * i])) do
    found[#found + 1] = entry[1]
    found[#found + 1] = entry[2][2]
  end
end
return found
"""
