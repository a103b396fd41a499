"""Define the Lua scripts of a shard, each of which is one transaction; store.py describes the keys.

Every entry has an id, ``milliseconds-count``, above all ids in the log and lists to which it is added. The milliseconds
are the server's time. If its clock was set back, the script counts on from the highest id, whichever keys the server
has evicted, so that no append can fail halfway. A full server (``noeviction``) refuses commands that take memory,
unless the script has written before. So scripts that free memory begin with a write that changes nothing. PUBLISH tells
waiting readers of new entries; a user who may not publish can still append.

A script stops at a command that its user may not run (ACL), and Redis undoes nothing. So that a script can be run
again, its first writes are those that do no harm when they are repeated. They use all commands that the others need.
An error names the line where it happened, and RedisClient finds the command on that line.
"""

_LIBRARY = """
local tag = ARGV[1]
local log, sessions, usage, tombstones, doomed =
  tag .. 'log', tag .. 'sessions', tag .. 'usage', tag .. 'tombstones', tag .. 'doomed'
-- While a cluster moves these keys to another node, this fails, before anything is written.
redis.call('EXISTS', log, sessions, usage, tombstones, doomed)
local used = redis.call('HMGET', usage, 'records', 'bytes', 'last', 'born', 'trimmed', 'expiry')
local all_records, all_bytes, newest, born, trimmed = used[1] or 0, used[2] or 0, used[3], used[4], used[5]
local expiry = used[6] or ''

-- Adds to the sizes of the shard.
local function count(records, bytes)
  all_records, all_bytes = all_records + records, all_bytes + bytes
  redis.call('HSET', usage, 'records', string.format('%.0f', all_records), 'bytes', string.format('%.0f', all_bytes))
end

-- Adds to the sizes of a session; without entries it is removed from the hash. ms: when it was used; nil: not now.
local function charge(session, records, bytes, ms)
  local held = redis.call('HMGET', sessions, session)[1]
  local r, b, at = string.match(held or '0 0 0', '^(%d+) (%d+) (%d+)$')
  r, b = r + records, b + bytes
  if r <= 0 then
    redis.call('HDEL', sessions, session)
  else
    redis.call('HSET', sessions, session, string.format('%.0f %.0f %.0f', r, math.max(b, 0), ms or at))
  end
end

-- Takes all that a session is said to hold off the sizes.
local function forget(session)
  local held = redis.call('HGET', sessions, session)
  if not held then return end
  local r, b = string.match(held, '^(%d+) (%d+)')
  charge(session, -r, -b)
  count(-r, -b)
end

-- Returns the server's time as the lowest id of this moment: milliseconds and a count.
local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000), 0
end

-- Returns ms-seq, or the id behind this one if that is higher.
local function above(ms, seq, id)
  local m, s = string.match(id, '^(%d+)-(%d+)$')
  m, s = tonumber(m), tonumber(s)
  if m > ms or (m == ms and s >= seq) then return m, s + 1 end
  return ms, seq
end

-- Returns the id of the last entry that retention, or an eviction of the log, may have removed, 0-0 if there is none.
-- Older code did not note it: then any entry before the present oldest one may have gone that way.
local function last_trimmed()
  if newest and redis.call('EXISTS', log) == 0 then return newest end
  if trimmed then return trimmed end
  local head = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1]
  if head then return head[1] == born and '0-0' or head[1] end
  return newest or '0-0'
end

-- The entries of a session or group are a list of "id rest", in the order of their ids.
local function id_of(element)
  return element and string.match(element, '^%S+')
end

local function next_id(lists)
  local ms, seq = clock()
  if newest then ms, seq = above(ms, seq, newest) end
  if #redis.call('XRANGE', log, string.format('%.0f-%.0f', ms, seq), '+', 'COUNT', 1) > 0 then
    ms, seq = above(ms, seq, redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1][1])
  end
  for _, key in ipairs(lists) do
    local last = id_of(redis.call('LINDEX', key, -1))
    if last then ms, seq = above(ms, seq, last) end
  end
  return ms, seq
end

-- count: as LREM's. 1: looks for the reference from the head of its group, -1: from the end.
local function drop_reference(id, fields, count)
  if fields.g then
    redis.call('LREM', tag .. 'g:' .. fields.g, count, id .. ' ' .. fields.b .. ' ' .. fields.s)
  end
  redis.call('XDEL', log, id)
end

-- Entries, their bytes, sessions, milliseconds of the oldest entry ('': none), the microseconds now, and tombstones.
local function state()
  local head, now = redis.call('XRANGE', log, '-', '+', 'COUNT', 1)[1], redis.call('TIME')
  return {
    string.format('%.0f', all_records), string.format('%.0f', all_bytes), redis.call('HLEN', sessions),
    head and string.match(head[1], '^%d+') or '', now[1] .. string.format('%06d', now[2]),
    redis.call('HLEN', tombstones)
  }
end

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end
"""

_SEARCH = """
local function index_of(key, id)  -- of the first element that is not below this id
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  ms, seq = tonumber(ms), tonumber(seq)
  local low, high = 0, redis.call('LLEN', key)
  while low < high do
    local middle = math.floor((low + high) / 2)
    local m, s = string.match(redis.call('LINDEX', key, middle), '^(%d+)-(%d+)')
    m, s = tonumber(m), tonumber(s)
    if m < ms or (m == ms and s < seq) then low = middle + 1 else high = middle end
  end
  return low
end
"""

APPEND = (
    _LIBRARY
    + """
-- ARGV: tag, writer, batch, milliseconds until the writer's key expires, and until payloads do (0: never),
-- bytes that an entry costs beside its payload, channel, session and newest id that are expected ('*': any), then for
-- each entry: session, payload, 1 and a group or 0 and ''. Returns the first id ('' for a conflict), the batch of this
-- writer that was the last one here ('' for none), the log's first id ever, and the shard's state.
local writer, batch, cost = tag .. 'w:' .. ARGV[2], ARGV[3], tonumber(ARGV[6])
local number, first = string.match(redis.call('GET', writer) or '', '^(%d+) (.+)$')
if number == batch then return {first, number, born or first, state()} end
if ARGV[9] ~= '*' then
  if (id_of(redis.call('LINDEX', tag .. 's:' .. ARGV[8], -1)) or '') ~= ARGV[9] then return {'', '', '', state()} end
end
local lists, seen = {}, {}
local function note(key)
  if not seen[key] then
    seen[key] = true
    lists[#lists + 1] = key
  end
end
for i = 10, #ARGV, 4 do
  note(tag .. 's:' .. ARGV[i])
  if ARGV[i + 2] == '1' then note(tag .. 'g:' .. ARGV[i + 3]) end
end
local ms, seq = next_id(lists)
first = string.format('%.0f-%.0f', ms, seq)
local last = string.format('%.0f-%.0f', ms, seq + (#ARGV - 9) / 4 - 1)
if not born or redis.call('EXISTS', log) == 0 then  -- new, or evicted
  born, expiry = first, ARGV[5]
elseif expiry ~= ARGV[5] then
  expiry = ''  -- RENEW makes them alike again
end
redis.call('HLEN', sessions)  -- for the state at the end

-- Ask for the rights by what changes nothing. Redis before 6.2 takes NOMKSTREAM for an id, and refuses it as a bad
-- stream ID only to a user who may run XADD.
local none = tag .. 'none'
local refused = redis.pcall('XADD', none, 'NOMKSTREAM', '*', 'x', 'x')
if refused and not string.find(refused.err, 'stream ID', 1, true) then
  redis.call('XADD', none, 'NOMKSTREAM', '*', 'x', 'x')
end
redis.call('SET', none, '', 'XX')
if ARGV[5] ~= '0' then
  redis.call('PEXPIRE', none, 1)
else
  redis.call('PERSIST', none)
end
redis.call('HSET', usage, 'last', last, 'born', born, 'trimmed', last_trimmed(), 'expiry', expiry)
for i = 10, #ARGV, 4 do
  -- What a session held before it expired or was evicted still counts if nobody has trimmed the log since.
  if redis.call('EXISTS', tag .. 's:' .. ARGV[i]) == 0 then forget(ARGV[i]) end
end

local total, id = 0
for i = 10, #ARGV, 4 do
  local session, payload, group = ARGV[i], ARGV[i + 1], ARGV[i + 2] == '1' and ARGV[i + 3]
  id = string.format('%.0f-%.0f', ms, seq)
  seq = seq + 1
  redis.call('RPUSH', tag .. 's:' .. session, id .. ' ' .. payload)
  if group then
    redis.call('RPUSH', tag .. 'g:' .. group, id .. ' ' .. #payload .. ' ' .. session)
    redis.call('XADD', log, id, 's', session, 'b', #payload, 'g', group)
  else
    redis.call('XADD', log, id, 's', session, 'b', #payload)
  end
  charge(session, 1, #payload + cost, ms)
  total = total + #payload + cost
end
count((#ARGV - 9) / 4, total)
redis.call('SET', writer, batch .. ' ' .. first, 'PX', ARGV[4])
for _, key in ipairs(lists) do
  if ARGV[5] ~= '0' then
    redis.call('PEXPIRE', key, ARGV[5])
  else
    redis.call('PERSIST', key)  -- an earlier retention may have let it expire
  end
end
redis.pcall('PUBLISH', ARGV[7], id)
return {first, number or '', born, state()}
"""
)

ERASE = (
    _LIBRARY
    + """
-- ARGV: tag, session, its tombstone ('': none), bytes that an entry costs beside its payload, channel. Sets the
-- session's list aside for SWEEP. Returns how many entries it had, and the id of the session's tombstone ('': none).
redis.call('DEL', tag)
local session, list = ARGV[2], tag .. 's:' .. ARGV[2]
local removed = redis.call('LLEN', list)
local marked = redis.call('HGET', tombstones, session)
local ms, seq = next_id({})
local id = string.format('%.0f-%.0f', ms, seq)
redis.call('HSET', usage, 'last', id, 'trimmed', last_trimmed())  -- SWEEP may remove the oldest entry
if removed > 0 then
  redis.call('SADD', doomed, tag .. 'd:' .. id)
  redis.call('RENAME', list, tag .. 'd:' .. id)
end
forget(session)
if ARGV[3] ~= '' then
  if marked then redis.call('XDEL', log, marked) end
  redis.call('XADD', log, id, 's', session, 't', ARGV[3])
  redis.call('HSET', tombstones, session, id)
  if not marked then count(1, #ARGV[3] + ARGV[4]) end
  marked = id
end
redis.pcall('PUBLISH', ARGV[5], id)
return {removed, marked or ''}
"""
)

SWEEP = (
    _LIBRARY
    + _SEARCH
    + """
-- ARGV: tag, page, most elements of groups that are walked past, about. Removes a page of what erased sessions left, at
-- least one entry. Returns how many entries it removed. A group may have 100,000 entries, and LREM walks to each.
local key = redis.call('SRANDMEMBER', doomed)
if not key then return 0 end
local removed, walked = 0, 0
for _, element in ipairs(redis.call('LRANGE', key, 0, ARGV[2] - 1)) do
  local id = id_of(element)
  local reference = redis.call('XRANGE', log, id, id)[1]
  local fields, from = reference and fields_of(reference), 1
  if reference and fields.g then
    local group = tag .. 'g:' .. fields.g
    local before = index_of(group, id)
    local behind = redis.call('LLEN', group) - before
    if behind < before then from = -1 end
    walked = walked + math.min(before, behind)
  end
  if reference then drop_reference(id, fields, from) end
  removed = removed + 1
  if walked >= tonumber(ARGV[3]) then break end
end
redis.call('LTRIM', key, removed, -1)
if redis.call('LLEN', key) == 0 then redis.call('SREM', doomed, key) end
return math.max(removed, 1)
"""
)

TRIM = (
    _LIBRARY
    + """
-- ARGV: tag, bytes that an entry costs beside its payload, most entries, most bytes, milliseconds of the last entry
-- to remove ('+': any). Removes the oldest entries. Returns how many they are, their bytes, and the shard's state.
redis.call('DEL', tag)
state()  -- so that nothing is removed where a command is refused that is needed at the end
local cost, bytes, removed = tonumber(ARGV[2]), 0, 0
for _, entry in ipairs(redis.call('XRANGE', log, '-', ARGV[5], 'COUNT', ARGV[3])) do
  if bytes >= tonumber(ARGV[4]) then break end
  local id, fields = entry[1], fields_of(entry)
  local list = tag .. 's:' .. fields.s
  redis.call('HSET', usage, 'trimmed', id)
  if fields.t then
    redis.call('HDEL', tombstones, fields.s)
  elseif id_of(redis.call('LINDEX', list, 0)) == id then
    redis.call('LPOP', list)
    charge(fields.s, -1, -(fields.b + cost))
    count(-1, -(fields.b + cost))
  elseif redis.call('EXISTS', list) == 0 then
    forget(fields.s)  -- it has expired or was evicted
  end
  drop_reference(id, fields, 1)
  if fields.t then count(-1, -(#fields.t + cost)) end
  bytes = bytes + (fields.b or 0) + cost
  removed = removed + 1
end
return {removed, string.format('%.0f', bytes), state()}
"""
)

STATE = (
    _LIBRARY
    + """
-- ARGV: tag, milliseconds. Removes what is left of a log that has been empty for so long. Returns the shard's state,
-- 1 if it has no keys, 1 if something of erased sessions is left, and the time after which all payloads expire ('':
-- it differs between them).
if newest and clock() - string.match(newest, '^%d+') > tonumber(ARGV[2]) and redis.call('XLEN', log) == 0
  and redis.call('EXISTS', tombstones, sessions) == 0 then
  redis.call('DEL', log, usage)
  all_records, all_bytes = 0, 0
end
return {state(), 1 - redis.call('EXISTS', log), redis.call('EXISTS', doomed), expiry}
"""
)

RENEW = (
    _LIBRARY
    + """
-- ARGV: tag, milliseconds after which payloads expire (0: never), id behind which to go on, most entries, least
-- milliseconds that are left to a payload. Lets the payloads of a page of entries expire so long after their session's
-- or group's newest entry. Returns the id behind which the next page begins; '': the log has no more.
redis.call('DEL', tag)
local ms, lives, last = clock(), {}, ''
local page = redis.call('XRANGE', log, '(' .. ARGV[3], '+', 'COUNT', ARGV[4])
for _, entry in ipairs(page) do
  local fields = fields_of(entry)
  last = entry[1]
  local left = math.max(string.match(last, '^%d+') + ARGV[2] - ms, tonumber(ARGV[5]))
  if not fields.t then lives[tag .. 's:' .. fields.s] = left end
  if fields.g then lives[tag .. 'g:' .. fields.g] = left end
end
-- Until the last page the payloads differ, and whoever comes next must go on.
if newest and expiry ~= ARGV[2] and expiry ~= '' then redis.call('HSET', usage, 'expiry', '') end
for key, left in pairs(lives) do
  if ARGV[2] ~= '0' then
    redis.call('PEXPIRE', key, string.format('%.0f', left))
  else
    redis.call('PERSIST', key)
  end
end
if #page == tonumber(ARGV[4]) then return last end
if newest then redis.call('HSET', usage, 'expiry', ARGV[2]) end
return ''
"""
)

BOUNDS = (
    _SEARCH
    + """
-- KEYS: a list. ARGV: lowest id, most elements from its end (-1: any). Returns the ids of the first and the last
-- element that these leave, or nothing.
local length = redis.call('LLEN', KEYS[1])
local first = index_of(KEYS[1], ARGV[1])
if ARGV[2] ~= '-1' then first = math.max(first, length - ARGV[2]) end
if first >= length then return {} end
return {
  string.match(redis.call('LINDEX', KEYS[1], first), '^%S+'), string.match(redis.call('LINDEX', KEYS[1], -1), '^%S+')
}
"""
)

RANGE = (
    _SEARCH
    + """
-- KEYS: a list. ARGV: lowest id, number of elements. Returns the elements.
local first = index_of(KEYS[1], ARGV[1])
return redis.call('LRANGE', KEYS[1], first, first + ARGV[2] - 1)
"""
)

GATHER = (
    _SEARCH
    + """
-- KEYS: lists. ARGV: for each its number of ids, then these in order. Returns the elements that have them.
local found, at = {}, 1
for _, key in ipairs(KEYS) do
  local index = nil
  for i = at + 1, at + ARGV[at] do
    local element = index and redis.call('LINDEX', key, index)
    if not element or string.match(element, '^%S+') ~= ARGV[i] then
      index = index_of(key, ARGV[i])
      element = redis.call('LINDEX', key, index)
    end
    if element and string.match(element, '^%S+') == ARGV[i] then
      found[#found + 1] = element
      index = index + 1
    end
  end
  at = at + 1 + ARGV[at]
end
return found
"""
)
