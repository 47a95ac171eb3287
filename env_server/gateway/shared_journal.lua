-- What several gateways know of their sessions together. A session is a hash, and its steps are a list beside it:
--   about        what never changes
--   generation   how often the session was moved; who knows an older one is not listened to any more
--   node, upstream_id   where it lives
--   episode, head, steps, over   its present episode (-1 before the first), how that began, how many steps it has, and
--                how the last one ended it (1 terminated, 2 truncated, 3 both)
--   answered_episode, answered_steps   what a gateway has answered of it, where that is more than what is here
--   holder, until   who moves it at present, and when somebody else may
--   ended        why it is no more
--   ttl_ms       how long after its last use it is kept
-- KEYS are the hashes; ARGV[1] is the command.

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

local function state_of(key)
  local found = redis.call('HMGET', key, 'generation', 'ended', 'holder', 'episode', 'steps', 'ttl_ms', 'until')
  return {
    generation = found[1], ended = found[2], holder = found[3], episode = tonumber(found[4]),
    steps = tonumber(found[5]), ttl_ms = found[6], until_ms = tonumber(found[7] or '0'),
  }
end

local function is_behind(state, episode, steps)
  return state.episode < episode or (state.episode == episode and state.steps < steps)
end

-- Why a gateway that knows a generation may do nothing with a session; nil where it may.
local function refusal(state, generation)
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
  if episode == state.episode and redis.call('HGET', key, 'head') == head then return 'ok' end
  if episode <= state.episode then return 'behind' end
  redis.call('HSET', key, 'episode', episode, 'head', head, 'steps', 0, 'over', 0)
  redis.call('DEL', steps_of(key))
  return 'ok'
end

local function append(key, state, episode, index, step, over)
  if episode > state.episode or (episode == state.episode and index > state.steps) then return 'gap' end
  if episode < state.episode then return 'behind' end
  if index < state.steps then
    return redis.call('LINDEX', steps_of(key), index) == step and 'ok' or 'behind'
  end
  if redis.call('RPUSH', steps_of(key), step) ~= index + 1 then
    -- The steps before it were evicted: what is left is of no use.
    redis.call('DEL', key, steps_of(key))
    return 'missing'
  end
  redis.call('HSET', key, 'steps', index + 1, 'over', over)
  return 'ok'
end

-- A step that has begun the next episode in the same call.
local function append_and_begin(key, state, episode, index, step, head)
  if state.episode == episode + 1 and redis.call('HGET', key, 'head') == head then return 'ok' end
  local status = append(key, state, episode, index, step, 0)
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
    if common > 0 and redis.call('LINDEX', steps_of(key), common - 1) ~= ARGV[first + common] then return 'behind' end
    if count < state.steps then return 'ok' end
  end
  redis.call('DEL', steps_of(key))
  arguments = first
  push(key, count)
  redis.call('HSET', key, 'episode', episode, 'head', head, 'steps', count, 'over', over)
  return 'ok'
end

local function write_one(key)
  local kind, generation = next_argument(), next_argument()
  local state = state_of(key)
  local episode, index, step, over, head
  if kind == 'step' or kind == 'last' then
    episode, index, step = tonumber(next_argument()), tonumber(next_argument()), next_argument()
  elseif kind ~= 'check' then
    episode = tonumber(next_argument())
  end
  if kind == 'step' or kind == 'episode' then over = next_argument() end
  if kind == 'last' or kind == 'begin' or kind == 'episode' then head = next_argument() end
  local count = kind == 'episode' and tonumber(next_argument()) or 0
  local refused = refusal(state, generation)
  if not refused and state.holder then refused = 'moving' end
  if refused then
    arguments = arguments + count
    return refused
  end
  local status = 'ok'
  if kind == 'step' then
    status = append(key, state, episode, index, step, over)
  elseif kind == 'last' then
    status = append_and_begin(key, state, episode, index, step, head)
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

-- All but the steps, and how long somebody may still take to move it.
function commands.load()
  local state = state_of(KEYS[1])
  local moving_ms = state.holder and math.max(0, state.until_ms - now_ms()) or 0
  return {redis.call('HGETALL', KEYS[1]), moving_ms}
end

-- The right to move a session, for a time; gives the new generation and the steps.
function commands.claim()
  local generation, holder, lease_ms = next_argument(), next_argument(), tonumber(next_argument())
  local state = state_of(KEYS[1])
  local refused = refusal(state, generation)
  if refused then return {refused} end
  if state.holder and state.until_ms > now_ms() then return {'moving'} end
  local answered = redis.call('HMGET', KEYS[1], 'answered_episode', 'answered_steps')
  if answered[1] and is_behind(state, tonumber(answered[1]), tonumber(answered[2])) then return {'behind'} end
  local steps = redis.call('LRANGE', steps_of(KEYS[1]), 0, -1)
  if #steps ~= state.steps then
    redis.call('DEL', KEYS[1], steps_of(KEYS[1]))
    return {'missing'}
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

-- The end of sessions; of a generation, or of any. Gives where they lived.
function commands.close()
  local reason, kept_ms = next_argument(), next_argument()
  local found = {}
  for number, key in ipairs(KEYS) do
    local generation = next_argument()
    local state = state_of(key)
    local refused = refusal(state, generation == '' and state.generation or generation)
    local place = redis.call('HMGET', key, 'node', 'upstream_id')
    found[number] = {refused or 'ok', place[1], place[2]}
    if not refused then
      redis.call('HSET', key, 'ended', reason)
      redis.call('DEL', steps_of(key))
      redis.call('PEXPIRE', key, kept_ms)
    end
  end
  return found
end

-- What a gateway has answered; gives how many sessions have less here, as after a fail-over to a copy that lagged.
function commands.mark()
  local behind = 0
  for _, key in ipairs(KEYS) do
    local episode, steps = tonumber(next_argument()), tonumber(next_argument())
    local state = state_of(key)
    if state.generation and not state.ended and is_behind(state, episode, steps) then
      behind = behind + 1
      local known = redis.call('HMGET', key, 'answered_episode', 'answered_steps')
      local marked = {episode = tonumber(known[1] or '-1'), steps = tonumber(known[2] or '0')}
      if is_behind(marked, episode, steps) then
        redis.call('HSET', key, 'answered_episode', episode, 'answered_steps', steps)
      end
    end
  end
  return behind
end

-- Whether it can be written to.
function commands.try()
  redis.call('SET', KEYS[1], '1', 'PX', 1000)
  return 'ok'
end

return commands[ARGV[1]]()
