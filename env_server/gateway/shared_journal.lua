-- What several gateways know of their sessions together. A session is a hash, and its steps are a list beside it:
--   about        what never changes
--   generation   how often the session was moved; who knows an older one is not listened to any more
--   node, upstream_id   where it lives
--   episode, head, steps, over   its present episode (-1 before the first), how that began, how many steps it has, and
--                how the last one ended it (1 terminated, 2 truncated, 3 both)
--   by0 to by7   which request took a step, as EPISODE:INDEX:CLAIM at INDEX modulo 8, for steps whose clients named no
--                place; CLAIM is empty where a client that named it has claimed a step of `open`
--   open         EPISODE:FIRST:AFTER: the steps from FIRST to before AFTER were written down as the node has them, and not
--                whose they are. Each is the first claim's that comes for it, unless it was answered already
--   answered_episode, answered_steps   what a gateway has answered of it, where that is more than what is here
--   holder, until   who moves it at present, and when somebody else may
--   ended        why it is no more
--   ttl_ms       how long after its last use it is kept
-- What is packed (about, head, steps) is sealed by a checksum: 0xc1 and four bytes before the content. Entries of earlier
-- releases are not.
-- KEYS are the hashes; ARGV[1] is the command.

-- Of steps whose indices have the same remainder by this number, the latest claim is kept. Of the steps of a session that
-- come to a gateway without a place, it sends one at a time, so that few claims come before one is compared again.
local CLAIMS = 8

-- Where gateways hear that sessions have ended: the reason, and their keys.
local CHANNEL = 'rollgym:watch'

local arguments = 1

local function next_argument()
  arguments = arguments + 1
  return ARGV[arguments]
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function steps_of(key)
  return key .. ':steps'
end

local function is_number(text)
  return text and string.find(text, '^%-?%d+$') ~= nil
end

local function state_of(key)
  local found = redis.call('HMGET', key, 'generation', 'ended', 'holder', 'episode', 'steps', 'ttl_ms', 'until')
  if found[1] and not (is_number(found[1]) and is_number(found[4]) and is_number(found[5]) and is_number(found[6])) then
    return {damaged = true, until_ms = 0}
  end
  return {
    generation = found[1], ended = found[2], holder = found[3], episode = tonumber(found[4]),
    steps = tonumber(found[5]), ttl_ms = found[6], until_ms = tonumber(found[7] or '0') or 0,
  }
end

local function is_same(entry, other)
  local function content(each)
    return each and string.byte(each, 1) == 0xc1 and string.sub(each, 6) or each
  end
  return content(entry) == content(other)
end

local function is_behind(state, episode, steps)
  return state.episode < episode or (state.episode == episode and state.steps < steps)
end

-- Why a gateway that knows a generation may do nothing with a session; nil where it may.
local function refusal(state, generation)
  if state.damaged then return 'damaged' end
  if not state.generation then return 'missing' end
  if state.ended then return 'ended:' .. state.ended end
  if state.generation ~= generation then return 'fenced' end
  return nil
end

local function keep(key, state)
  redis.call('PEXPIRE', key, state.ttl_ms)
  redis.call('PEXPIRE', steps_of(key), state.ttl_ms)
end

local function push(key, count)
  for _ = 1, count do
    redis.call('RPUSH', steps_of(key), next_argument())
  end
end

local function begin(key, state, episode, head)
  if episode == state.episode and is_same(redis.call('HGET', key, 'head'), head) then return 'ok' end
  if episode <= state.episode then return 'behind' end
  redis.call('HSET', key, 'episode', episode, 'head', head, 'steps', 0, 'over', 0)
  redis.call('DEL', steps_of(key))
  return 'ok'
end

local function place_of(episode, index)
  return episode .. ':' .. index .. ':'
end

local function slot_of(index)
  return 'by' .. index % CLAIMS
end

local function read_slot(content)
  local episode, index, owner = string.match(content or '', '^(%d+):(%d+):(.*)$')
  return tonumber(episode), tonumber(index), owner
end

-- Whether a gateway has reported that it has answered a step, whose claim may have been lost with it.
local function was_answered(marked_episode, marked_steps, episode, index)
  if not (is_number(marked_episode) and is_number(marked_steps)) then return false end
  return is_behind({episode = episode, steps = index}, tonumber(marked_episode), tonumber(marked_steps))
end

-- Whether a step that is here already is the one of a claim, or may be: of two equal steps for one place, the node has
-- taken one and answered both with it. Clients that name a place have no claim, and get what is there.
local function claim(key, episode, index, by)
  local found = redis.call('HMGET', key, slot_of(index), 'open', 'answered_episode', 'answered_steps')
  local of_episode, of_index, owner = read_slot(found[1])
  if of_episode == episode and of_index == index then
    return (by == '' or by == owner) and 'ok' or 'taken'
  end
  if of_episode and (of_episode > episode or (of_episode == episode and of_index > index)) then
    return by == '' and 'ok' or 'unsure'
  end
  local open_episode, first, after = string.match(found[2] or '', '^(%d+):(%d+):(%d+)$')
  if tonumber(open_episode) == episode and index < tonumber(after) then
    if index < tonumber(first) or was_answered(found[3], found[4], episode, index) then
      return by == '' and 'ok' or 'unsure'
    end
    redis.call('HSET', key, slot_of(index), place_of(episode, index) .. by)
    return 'ok'
  end
  return by == '' and 'ok' or 'taken'
end

-- Steps from one index to before another one are the node's, and nobody's yet.
local function open(key, episode, first, after)
  if first == after then return end
  local found = redis.call('HGET', key, 'open')
  local before, from = string.match(found or '', '^(%d+:)(%d+):' .. first .. '$')
  if before == episode .. ':' then first = from end
  redis.call('HSET', key, 'open', episode .. ':' .. first .. ':' .. after)
end

local function append(key, state, episode, index, step, over, by)
  if episode > state.episode or (episode == state.episode and index > state.steps) then return 'gap' end
  if episode < state.episode then return 'behind' end
  if index < state.steps then
    if not is_same(redis.call('LINDEX', steps_of(key), index), step) then return 'behind' end
    return claim(key, episode, index, by)
  end
  if by ~= '' then
    local marked = redis.call('HMGET', key, 'answered_episode', 'answered_steps')
    -- It was answered before the journal went back, perhaps to another client.
    if was_answered(marked[1], marked[2], episode, index) then return 'unsure' end
  end
  if redis.call('RPUSH', steps_of(key), step) ~= index + 1 then
    -- Steps before it were evicted, or never came: what is left is of no use.
    redis.call('DEL', key, steps_of(key))
    return 'damaged'
  end
  if by == '' then
    redis.call('HSET', key, 'steps', index + 1, 'over', over)
  else
    redis.call('HSET', key, 'steps', index + 1, 'over', over, slot_of(index), place_of(episode, index) .. by)
  end
  return 'ok'
end

-- A step that has begun the next episode in the same call.
local function append_and_begin(key, state, episode, index, step, head, by)
  if state.episode == episode + 1 and is_same(redis.call('HGET', key, 'head'), head) then
    if by == '' then return 'ok' end
    local of_episode, of_index, owner = read_slot(redis.call('HGET', key, slot_of(index)))
    -- A gateway may have written the next episode as the node has it, and not whose step has begun it.
    if of_episode ~= episode or of_index ~= index then return 'unsure' end
    return by == owner and 'ok' or 'taken'
  end
  local status = append(key, state, episode, index, step, 0, by)
  if status ~= 'ok' then return status end
  return begin(key, state, episode + 1, head)
end

-- A whole episode as its node has it, which has at least what is here.
local function replace(key, state, episode, head, over, count)
  local first = arguments
  arguments = first + count
  if episode < state.episode then return 'behind' end
  if episode == state.episode then
    local common = math.min(count, state.steps)
    local known = common > 0 and redis.call('LINDEX', steps_of(key), common - 1)
    if common > 0 and not is_same(known, ARGV[first + common]) then return 'behind' end
    if count < state.steps then return 'ok' end
  end
  redis.call('DEL', steps_of(key))
  arguments = first
  push(key, count)
  open(key, episode, episode == state.episode and state.steps or 0, count)
  redis.call('HSET', key, 'episode', episode, 'head', head, 'steps', count, 'over', over)
  return 'ok'
end

local function write_one(key)
  local kind, generation = next_argument(), next_argument()
  local state = state_of(key)
  local episode, index, step, over, head, by
  if kind == 'step' or kind == 'last' then
    episode, index, step = tonumber(next_argument()), tonumber(next_argument()), next_argument()
  elseif kind ~= 'check' then
    episode = tonumber(next_argument())
  end
  if kind == 'step' or kind == 'episode' then over = next_argument() end
  if kind == 'last' or kind == 'begin' or kind == 'episode' then head = next_argument() end
  if kind == 'step' or kind == 'last' then by = next_argument() end
  local count = kind == 'episode' and tonumber(next_argument()) or 0
  local refused = refusal(state, generation)
  if not refused and state.holder then refused = 'moving' end
  if refused then
    arguments = arguments + count
    return refused
  end
  local status = 'ok'
  if kind == 'step' then
    status = append(key, state, episode, index, step, over, by)
  elseif kind == 'last' then
    status = append_and_begin(key, state, episode, index, step, head, by)
  elseif kind == 'begin' then
    status = begin(key, state, episode, head)
  elseif kind == 'episode' then
    status = replace(key, state, episode, head, over, count)
  end
  if status == 'ok' then keep(key, state) end
  return status
end

local commands = {}

-- What gateways have seen of many sessions.
function commands.write()
  local statuses = {}
  for number, key in ipairs(KEYS) do
    statuses[number] = write_one(key)
  end
  return statuses
end

-- New sessions, all or none.
function commands.open()
  for _, key in ipairs(KEYS) do
    local about, ttl_ms, node, upstream_id = next_argument(), next_argument(), next_argument(), next_argument()
    local episode, head, over, count = next_argument(), next_argument(), next_argument(), tonumber(next_argument())
    redis.call('DEL', key, steps_of(key))
    redis.call('HSET', key, 'about', about, 'ttl_ms', ttl_ms, 'generation', 1, 'node', node,
      'upstream_id', upstream_id, 'episode', episode, 'head', head, 'steps', count, 'over', over)
    push(key, count)
    keep(key, {ttl_ms = ttl_ms})
  end
  return 'ok'
end

-- All but the steps, how long somebody may still take to move it, and how many steps there are.
function commands.load()
  local state = state_of(KEYS[1])
  -- This is a write, so that whoever waits for replicas learns nothing that these lack.
  if state.generation and not state.ended then keep(KEYS[1], state) end
  local moving_ms = state.holder and math.max(0, state.until_ms - now_ms()) or 0
  return {redis.call('HGETALL', KEYS[1]), moving_ms, redis.call('LLEN', steps_of(KEYS[1]))}
end

-- The right to move a session, for a time; gives the new generation and the steps.
function commands.claim()
  local generation, holder, lease_ms = next_argument(), next_argument(), tonumber(next_argument())
  local state = state_of(KEYS[1])
  local refused = refusal(state, generation)
  if refused then return {refused} end
  if state.holder and state.until_ms > now_ms() then return {'moving'} end
  local answered = redis.call('HMGET', KEYS[1], 'answered_episode', 'answered_steps')
  local is_marked = is_number(answered[1]) and is_number(answered[2])
  if is_marked and is_behind(state, tonumber(answered[1]), tonumber(answered[2])) then return {'behind'} end
  local steps = redis.call('LRANGE', steps_of(KEYS[1]), 0, -1)
  if #steps ~= state.steps or (answered[1] and not is_marked) then
    redis.call('DEL', KEYS[1], steps_of(KEYS[1]))
    return {'damaged'}
  end
  redis.call('HSET', KEYS[1], 'generation', generation + 1, 'holder', holder, 'until', now_ms() + lease_ms)
  keep(KEYS[1], state)
  return {'ok', state.episode, redis.call('HGET', KEYS[1], 'head'), steps}
end

function commands.renew()
  local generation, lease_ms = next_argument(), tonumber(next_argument())
  local refused = refusal(state_of(KEYS[1]), generation)
  if refused then return refused end
  redis.call('HSET', KEYS[1], 'until', now_ms() + lease_ms)
  return 'ok'
end

-- The end of a move: to a new place, or to none, so that the old one holds.
function commands.moved()
  local generation, node, upstream_id = next_argument(), next_argument(), next_argument()
  local refused = refusal(state_of(KEYS[1]), generation)
  if refused then return refused end
  if upstream_id then redis.call('HSET', KEYS[1], 'node', node, 'upstream_id', upstream_id) end
  redis.call('HDEL', KEYS[1], 'holder', 'until')
  return 'ok'
end

-- The end of sessions; of a generation, or of any. Gives where they lived, and tells all gateways.
function commands.close()
  local reason, kept_ms = next_argument(), next_argument()
  local found, ended = {}, {reason}
  for number, key in ipairs(KEYS) do
    local generation = next_argument()
    local state = state_of(key)
    local refused = refusal(state, generation == '' and state.generation or generation)
    local place = redis.call('HMGET', key, 'node', 'upstream_id')
    found[number] = {refused or 'ok', place[1], place[2]}
    if state.damaged then redis.call('DEL', key, steps_of(key)) end
    -- This is a write, too: an end that is known already may not have reached the replicas.
    if state.ended then redis.call('PEXPIRE', key, kept_ms) end
    if not refused then
      redis.call('HSET', key, 'ended', reason)
      redis.call('DEL', steps_of(key))
      redis.call('PEXPIRE', key, kept_ms)
      ended[#ended + 1] = key
    end
  end
  -- A user who may not publish may end sessions all the same.
  if #ended > 1 then redis.pcall('PUBLISH', CHANNEL, table.concat(ended, ' ')) end
  return found
end

-- What a gateway has answered of its sessions; gives how many have less here, as after a fail-over to a copy that
-- lagged, and then why each has ended, or nothing.
function commands.mark()
  local behind, ends = 0, {}
  for number, key in ipairs(KEYS) do
    local episode, steps = tonumber(next_argument()), tonumber(next_argument())
    local state = state_of(key)
    ends[number] = state.ended or ''
    if state.generation and not state.ended and is_behind(state, episode, steps) then
      behind = behind + 1
      local known = redis.call('HMGET', key, 'answered_episode', 'answered_steps')
      local marked = {episode = tonumber(known[1] or '-1') or -1, steps = tonumber(known[2] or '0') or 0}
      if is_behind(marked, episode, steps) then
        redis.call('HSET', key, 'answered_episode', episode, 'answered_steps', steps)
      end
    end
  end
  return {behind, ends}
end

-- Whether it can be written to.
function commands.try()
  redis.call('SET', KEYS[1], '1', 'PX', 1000)
  return 'ok'
end

return commands[ARGV[1]]()
