"""Training episodes: whatever a session or an engine does, there is an outcome."""

import asyncio
import math
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.records.trajectory import TrajectoryOutcome
from rollgym.trainer.rollout.actors import ModelActor
from rollgym.trainer.rollout.prompts import PromptBuilder
from tests.support.lone_episodes import ASKING, TASK, Engine, Pool, Prompts, Session, played_in

played = partial(played_in, __name__)


async def test_the_time_of_an_episode_is_told_by_what_it_waited_for():
    class Slow(Session):
        async def reset(self, seed, options):
            await asyncio.sleep(0.02)
            return await super().reset(seed, options)

        async def step(self, reply):
            await asyncio.sleep(0.03)
            return await super().step(reply)

    class Verifier(Slow):
        env = SimpleNamespace(metadata={}, kind="stateless")

    spent = (await played(Pool(Slow()))).timeline.seconds()
    assert spent["environment"] >= 0.05
    assert spent["verify"] == spent["generate"] == 0.0
    verified = await played(Pool(Verifier()), reward="slow_reward")
    assert verified.timeline.seconds()["verify"] >= 0.03 + 0.01
    assert verified.timeline.seconds()["environment"] >= 0.02
    assert verified.timeline.ended is not None
    assert verified.as_record()["seconds"] == pytest.approx(verified.timeline.seconds(), abs=1e-6)


def slow_reward(trajectory):
    time.sleep(0.01)
    return [1.0 for _ in trajectory.turns]


async def test_the_wait_for_a_session_is_the_queue_s():
    class Full(Pool):
        @asynccontextmanager
        async def session(self, task):
            await asyncio.sleep(0.03)
            async with super().session(task) as session:
                yield session

    for pool in (Full(), Full(problem=ProblemError("at_capacity", "no place"))):
        spent = (await played(pool)).timeline.seconds()
        assert spent["queue"] >= 0.03
        assert spent["verify"] == spent["generate"] == 0.0


@pytest.mark.parametrize(
    ("problem", "outcome"),
    [
        (ProblemError("env_error", "ValueError: no board"), TrajectoryOutcome.ENVIRONMENT_ERROR),
        (ProblemError("at_capacity", "no place"), TrajectoryOutcome.ENVIRONMENT_ERROR),
        (ProblemError("upstream_error", "gone"), TrajectoryOutcome.ENVIRONMENT_ERROR),
        (ProblemError("step_timeout", "slow"), TrajectoryOutcome.TIMEOUT),
        (DecodeError("a space has no bounds"), TrajectoryOutcome.ENVIRONMENT_ERROR),
    ],
)
async def test_a_session_that_cannot_be_made_is_an_outcome(problem, outcome):
    trajectory = await played(Pool(problem=problem))
    assert trajectory.outcome is outcome
    assert trajectory.detail == str(problem)
    assert (trajectory.member, trajectory.attempt) == (1, 2)


async def test_what_playing_again_cannot_mend_is_raised():
    for code in ("unknown_env", "invalid_kwargs", "unauthorized", "forbidden", "too_large", "not_stateless"):
        with pytest.raises(ProblemError, match=code):
            await played(Pool(problem=ProblemError(code, "no")))


TOO_LARGE = ProblemError("too_large", "the request has 3095 bytes; the limit is 1024")
TOO_LARGE_ANSWER = ProblemError("too_large", "the reply has 3095 bytes", part="reply")


class ResetRefused(Session):
    async def reset(self, seed, options):
        raise self.problem


async def test_what_is_too_large_may_be_the_runs_the_rows_or_the_policys():
    with pytest.raises(ProblemError, match="too_large"):
        await played(Pool(ResetRefused(problem=TOO_LARGE)))
    row = replace(TASK, row="row 3 of riddles.jsonl", options={"problem": "x" * 3000})
    unplayable = await played(Pool(ResetRefused(problem=TOO_LARGE)), task=row)
    assert unplayable.outcome is TrajectoryOutcome.UNPLAYABLE
    assert unplayable.detail == (
        "Any-v0 does not take row 3 of riddles.jsonl: the request has 3095 bytes; the limit is 1024"
    )
    for session in (
        Session(problem=TOO_LARGE),
        Session(problem=TOO_LARGE_ANSWER),
        ResetRefused(problem=TOO_LARGE_ANSWER),
    ):
        for task in (TASK, row):
            assert (await played(Pool(session), task=task)).outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    by_agent = await played(Pool(Session(problem=TOO_LARGE)), agent=ASKING)
    assert by_agent.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    with pytest.raises(ProblemError, match="too_large"):
        await played(Pool(problem=TOO_LARGE), task=row)  # kwargs are not the row's


@pytest.mark.parametrize(
    "session",
    [
        Session(reward=math.nan),
        Session(reward=-math.inf),
        Session(reward=True),
        Session(reward=1e300),
        Session(reward=None),
        Session(info={"format_penalty": math.nan}),
        Session(info={"format_penalty": "much"}),
    ],
)
async def test_a_number_of_an_environment_that_is_none_is_an_outcome(session):
    trajectory = await played(Pool(session))
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert not trajectory.outcome.is_result
    assert trajectory.detail.startswith("the environment's ")


@pytest.mark.parametrize(
    ("info", "outcome"),
    [
        ({"success": 1}, TrajectoryOutcome.SOLVED),
        ({"success": 0.0}, TrajectoryOutcome.FAILED),
        ({"success": "false"}, TrajectoryOutcome.INVALID_NUMBER),
        ({"success": None}, TrajectoryOutcome.INVALID_NUMBER),
        ({"action_is_valid": "no"}, TrajectoryOutcome.INVALID_NUMBER),
    ],
)
async def test_truth_values_are_booleans_or_numbers(info, outcome):
    assert (await played(Pool(Session(info=info)))).outcome is outcome


@pytest.mark.parametrize(
    "messages",
    ["hello", [1], [{"role": "user"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": None}]],
)
async def test_messages_of_an_environment_that_are_none_are_an_outcome(messages):
    class Odd(Session):
        async def reset(self, seed, options):
            return "board", {"messages": messages}

    trajectory = await played(Pool(Odd()))
    assert trajectory.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR
    assert "info['messages'] must be a list of messages" in trajectory.detail


@pytest.mark.parametrize("info", [{"instruction": 5}, {"tools": "all"}, {"tools": [1]}])
async def test_instructions_and_tools_that_are_none_are_an_outcome(info):
    class Odd(Session):
        async def reset(self, seed, options):
            return "board", info

    prompts = PromptBuilder(SimpleNamespace(), None, PromptSettings(tools="template"))
    actor = ModelActor(Engine(-1.0), prompts, SamplingParams(4), 64, 0, "test")
    assert (await played(Pool(Odd()), actor=actor)).outcome is TrajectoryOutcome.ENVIRONMENT_ERROR


async def test_very_long_keys_of_states_are_kept_as_digests():
    class Long(Session):
        async def reset(self, seed, options):
            return "board", {"anchor": "x" * 1_000_000}

    (turn,) = (await played(Pool(Long()))).turns
    assert len(turn.anchor) == 32


async def test_an_answer_that_cannot_be_read_is_an_outcome():
    trajectory = await played(
        Pool(Session(problem=DecodeError("the reward of a step is a number, not bool")))
    )
    assert trajectory.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR


async def test_an_action_that_the_space_refuses_does_not_end_the_run():
    trajectory = await played(Pool(Session(problem=ProblemError("invalid_action", "too long"))))
    assert trajectory.outcome is TrajectoryOutcome.ENVIRONMENT_ERROR


async def test_metrics_of_an_environment_that_are_no_numbers_are_counted():
    metrics = {"steps": 2, "won": True, "speed": math.nan, "size": math.inf, "name": "x"}
    trajectory = await played(Pool(Session(info={"metrics": metrics})))
    assert trajectory.outcome is TrajectoryOutcome.SOLVED
    assert trajectory.metrics == {"steps": 2.0, "won": 1.0, "metrics_refused": 2.0}


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.5])
async def test_log_probabilities_that_are_none_are_an_outcome(logprob):
    actor = ModelActor(Engine(logprob), Prompts(), SamplingParams(4), 64, 0, "test")
    trajectory = await played(Pool(), actor=actor)
    assert trajectory.outcome is TrajectoryOutcome.INVALID_NUMBER
    assert "inference engine" in trajectory.detail
