"""Rewards and agents of the user's in training episodes: what they return or do is looked at, mistakes name them."""

import inspect
import json
import math
import sys
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.core.errors import PluginError
from rollgym.trainer.core.plugins import load_plugin
from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.actors import ModelActor, View
from rollgym.trainer.rollout.episodes import group_reward
from tests.support.lone_episodes import ASKING, TASK, Engine, Pool, Prompts, Session, played_in
from tests.support.played_groups import played_groups
from tests.support.tiny_models import sharp_model

played = partial(played_in, __name__)


def one_each(trajectory):
    return np.ones(len(trajectory.turns), dtype=np.float32)


def not_a_number(trajectory):
    return [math.nan for _ in trajectory.turns]


def a_flag(trajectory):
    return [True for _ in trajectory.turns]


def too_much_together(trajectory):
    return [{"a": 9e8, "b": 9e8} for _ in trajectory.turns]


def too_many(trajectory):
    return [0.0] * 5


def nothing(trajectory):
    return None


def broken(trajectory):
    return [int("x") for _ in trajectory.turns]


def wrong_signature():
    return []


async def test_rewards_of_the_user_replace_the_environments():
    trajectory = await played(Pool(Session(reward=7.0)), reward="one_each")
    assert [turn.reward for turn in trajectory.turns] == [1.0]


@pytest.mark.parametrize("function", ["not_a_number", "a_flag", "too_much_together"])
async def test_a_reward_of_the_users_that_is_no_number_is_an_outcome(function):
    trajectory = await played(Pool(), reward=function)
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert f"a reward of {__name__}:{function} is " in trajectory.detail


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_many", "returned 5 rewards for 1 turns"),
        ("nothing", "must return one reward for each turn, not NoneType"),
        ("broken", "raised ValueError: invalid literal for int()"),
        ("wrong_signature", "raised TypeError: wrong_signature"),
    ],
)
async def test_a_bug_in_a_reward_names_plugin_file_and_line(function, message):
    with pytest.raises(PluginError) as raised:
        await played(Pool(), reward=function)
    text = str(raised.value)
    assert text.startswith(f"rollout.reward '{__name__}:{function}' ")
    assert message in text
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    line = int(text.rpartition("line ")[2].rstrip(")"))
    assert __file__ in text
    where = 'int("x")' if function == "broken" else f"def {function}("
    assert where in lines[line - 1]


def remarking(trajectory):
    trajectory.metrics["length"] = 3.0
    trajectory.detail = "read"
    trajectory.outcome = TrajectoryOutcome.FAILED
    return [0.5 for _ in trajectory.turns]


async def test_a_reward_may_write_remarks_into_the_episode():
    trajectory = await played(Pool(), reward="remarking")
    assert (trajectory.outcome, trajectory.detail) == (TrajectoryOutcome.FAILED, "read")
    assert trajectory.metrics["length"] == 3.0
    assert trajectory.total_reward == 0.5


CHANGES = {
    "no turns": (lambda episode: episode.turns.clear(), "number of turns"),
    "a turn twice": (lambda episode: episode.turns.append(episode.turns[0]), "number of turns"),
    "a turn elsewhere": (lambda episode: setattr(episode.turns[0], "start", 0), "place of a turn's tokens"),
    "other ids": (lambda episode: segment_of(episode).ids.__setitem__(0, 10**6), "ids"),
    "inverted": (lambda episode: segment_of(episode).action_mask.reverse(), "mask"),
    "not finite": (
        lambda episode: segment_of(episode).behaviour_logprobs.__setitem__(-1, math.nan),
        "log-probabilities",
    ),
    "one less": (lambda episode: segment_of(episode).behaviour_logprobs.pop(), "log-probabilities"),
    "newer": (lambda episode: segment_of(episode).versions.__setitem__(0, 9), "policy versions"),
    "no segments": (lambda episode: episode.segments.clear(), "number of segments"),
    "no task": (lambda episode: setattr(episode, "task", None), "task"),
    "a word": (lambda episode: setattr(episode, "outcome", "great"), "its outcome 'great' is none of SOLVED"),
    "not played": (
        lambda episode: setattr(episode, "outcome", TrajectoryOutcome.TIMEOUT),
        "is none of SOLVED, FAILED",
    ),
    "no number": (
        lambda episode: episode.metrics.update(success=math.nan),
        "its metric 'success' is nan, which is no finite number",
    ),
    "a flag": (lambda episode: episode.metrics.update(success=True), "its metric 'success' is True"),
    "no metrics": (lambda episode: setattr(episode, "metrics", None), "raised AttributeError"),
    "no text": (lambda episode: setattr(episode.turns[0], "reply", None), "the text of turn 0"),
    "no penalty": (
        lambda episode: setattr(episode.turns[0], "format_penalty", math.inf),
        "the format_penalty of turn 0",
    ),
}
_change = []


def segment_of(episode):
    return episode.segments[0]


RECORDED = played_groups(sharp_model(), groups=1, members=1)[0].trajectories[0]


async def recorded(session, task, member, actor, max_turns, attempt):
    """An agent whose episode has tokens."""
    return replace(deepcopy(RECORDED), task=task)


def changing(trajectory):
    CHANGES[_change[0]][0](trajectory)
    return [0.0 for _ in trajectory.turns]


async def changing_later(trajectory):
    return changing(trajectory)


def changing_while_read(trajectory):
    for _ in list(trajectory.turns):
        yield 0.0
    CHANGES[_change[0]][0](trajectory)


def changing_a_group(trajectories):
    CHANGES[_change[0]][0](trajectories[1])
    return [[0.0 for _ in trajectory.turns] for trajectory in trajectories]


def clearing_a_group(trajectories):
    given = [[0.0 for _ in trajectory.turns] for trajectory in trajectories]
    trajectories.clear()
    return given


@pytest.mark.parametrize("name", CHANGES)
async def test_a_reward_that_changes_what_was_played_is_named(name):
    _change[:] = [name]
    functions = ["changing", "changing_later", "changing_while_read"]
    for function in functions[:2] if name == "no turns" else functions:
        with pytest.raises(PluginError) as raised:
            await played(Pool(), agent="recorded", reward=function)
        text = str(raised.value)
        assert text.startswith(f"rollout.reward '{__name__}:{function}' "), text
        assert CHANGES[name][1] in text
        assert __file__ in text


async def test_a_groups_reward_that_changes_what_was_played_is_named():
    group = Group(0, TASK, 0, [await played(Pool(), agent="recorded") for _ in range(2)])
    for name, (_, message) in CHANGES.items():
        _change[:] = [name]
        shown = deepcopy(group)
        with pytest.raises(PluginError) as raised:
            await group_reward(load_plugin(f"{__name__}:changing_a_group", "rollout.group_reward"))(shown)
        assert message in str(raised.value)
    await group_reward(load_plugin(f"{__name__}:clearing_a_group", "rollout.group_reward"))(group)
    assert len(group.trajectories) == 2


async def agent_with_a_bug(session, task, member, actor, max_turns, attempt):
    return {}["missing"]


async def agent_that_returns_nothing(session, task, member, actor, max_turns, attempt):
    return None


_STRANGE = ContextVar("what an agent records")


async def agent_with_a_nan(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, turns=[Turn(-1, 0, 0, "", "", reward=math.nan)])


def _segment(**lists):
    whole = {
        "ids": [1],
        "action_mask": [True],
        "behaviour_logprobs": [-1.0],
        "versions": [0],
        "turn_index": [0],
    }
    return Segment(**(whole | lists))


def _turns():
    return [Turn(0, 0, 1, "", "")]


async def agent_without_a_log_probability(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[_segment(behaviour_logprobs=[None])], turns=_turns())


async def agent_with_ids_that_are_words(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[_segment(ids=["a"])], turns=_turns())


async def agent_with_a_strange_id(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[_segment(ids=[_STRANGE.get()])], turns=_turns())


async def agent_with_a_strange_version(session, task, member, actor, max_turns, attempt):
    segments = [_segment(versions=[_STRANGE.get()])]
    return Trajectory(task, member, attempt, segments=segments, turns=_turns())


async def agent_without_an_outcome(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, outcome="solved")


async def agent_with_an_odd_mask(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[_segment(action_mask=["x"])])


async def agent_with_a_turn_that_there_is_not(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[_segment()])


async def agent_with_a_metric_that_is_none(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, metrics={"success": math.nan})


async def test_a_metric_of_an_agents_record_that_is_none_is_an_outcome():
    trajectory = await played(Pool(), agent="agent_with_a_metric_that_is_none")
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert "the metric 'success' of the record is nan" in trajectory.detail


async def agent_with_a_metric_in_words(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, metrics={"speed": "high"})


async def agent_without_lists(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[_segment(versions=None)])


async def agent_with_numbers_of_numpy(session, task, member, actor, max_turns, attempt):
    numbers = _segment(ids=[np.int64(1)], behaviour_logprobs=[np.float32(-1.0)])
    return Trajectory(task, member, attempt, segments=[numbers], turns=_turns())


async def agent_with_a_torn_record(session, task, member, actor, max_turns, attempt):
    return Trajectory(task, member, attempt, segments=[Segment(ids=[1, 2], behaviour_logprobs=[0.0])])


async def test_a_problem_of_the_environment_in_an_agent_of_the_users_is_an_outcome():
    trajectory = await played(Pool(Session(problem=ProblemError("env_error", "oops"))), agent=ASKING)
    assert trajectory.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    unread = DecodeError("the reward of a step is a number, not bool")
    trajectory = await played(Pool(Session(problem=unread)), agent=ASKING)
    assert (trajectory.outcome, trajectory.detail) == (TrajectoryOutcome.ENVIRONMENT_ERROR, str(unread))


async def agent_that_asks_the_policy(session, task, member, actor, max_turns, attempt):
    trajectory = Trajectory(task, member, attempt)
    observation, info = await session.reset(seed=1, options=None)
    trajectory.turns.append(await actor.act(trajectory, View(0, observation, (), info)))
    return trajectory


async def test_a_prompt_without_room_in_an_agent_of_the_users_is_an_outcome():
    actor = ModelActor(Engine(-0.5), Prompts(), SamplingParams(4), 5, 0, "test")
    trajectory = await played(Pool(), actor=actor, agent="agent_that_asks_the_policy")
    assert trajectory.outcome is TrajectoryOutcome.AGENT_ERROR
    assert "passes model.max_length 5" in trajectory.detail
    assert (trajectory.member, trajectory.attempt) == (1, 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("agent_with_a_bug", "raised KeyError"),
        ("agent_that_returns_nothing", "must return a Trajectory, not NoneType"),
        ("agent_with_a_torn_record", "the lists of segment 0 differ in length"),
        ("agent_with_ids_that_are_words", "raised TypeError"),
        ("agent_without_lists", "raised TypeError"),
        ("agent_without_an_outcome", "its outcome 'solved' is no Outcome"),
        ("agent_with_an_odd_mask", "the mask of segment 0 holds more than truth values"),
        (
            "agent_with_a_turn_that_there_is_not",
            "a sampled token of segment 0 is of a turn that there is not",
        ),
        ("agent_with_a_metric_in_words", "raised ValueError: could not convert"),
    ],
)
async def test_a_bug_in_an_agent_names_it(function, message):
    with pytest.raises(PluginError, match=f"rollout.agent '{__name__}:{function}'") as raised:
        await played(Pool(), agent=function)
    assert message in str(raised.value)


async def test_numbers_of_an_agent_are_looked_at():
    assert (await played(Pool(), agent="agent_with_a_nan")).outcome is TrajectoryOutcome.INVALID_NUMBER
    trajectory = await played(Pool(), agent="agent_without_a_log_probability")
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert trajectory.detail.startswith("a log-probability of the record is None")
    (segment,) = (await played(Pool(), agent="agent_with_numbers_of_numpy")).segments
    assert json.dumps([segment.ids, segment.behaviour_logprobs]) == "[[1], [-1.0]]"


@pytest.mark.parametrize("value", [-1, 260, 10**30, True, np.int64(-7), torch.tensor(True)], ids=str)
async def test_an_id_that_the_model_does_not_know_is_an_outcome(value):
    _STRANGE.set(value)
    trajectory = await played(Pool(), vocabulary=260, agent="agent_with_a_strange_id")
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert trajectory.detail.startswith("a token id of segment 0 of the record is ")
    assert trajectory.detail.endswith(
        "no integer from 0 to 259: record the ids that the policy's own tokenizer or `actor.act` gave"
    )
    _STRANGE.set(259)
    assert (await played(Pool(), vocabulary=260, agent="agent_with_a_strange_id")).outcome.is_result


@pytest.mark.parametrize("value", [-2, 10**30, True], ids=str)
async def test_a_version_that_there_cannot_be_is_an_outcome(value):
    _STRANGE.set(value)
    trajectory = await played(Pool(), agent="agent_with_a_strange_version")
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert trajectory.detail.startswith("a policy version of segment 0 of the record is ")
