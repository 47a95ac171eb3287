"""Steps that an agent takes on its own: what they earn belongs to the policy's last reply, all of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollgym.clients.client.session import EnvSession
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.agents.black_box import conclude
from rollgym.trainer.rollout.agents.environment import EpisodeEnvironment
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.runners import AgentEnd
from rollgym.trainer.rollout.agents.session import SessionCounts
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.tasks.task import Task
from tests.support.processes import env_server

TASK = Task(0, "Named", seed=1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with env_server("--env", "Named=tests.support.named_rewards:NamedRewards") as address:
        yield address


@pytest.fixture
async def pool(url: str) -> AsyncIterator[EnvironmentPool]:
    async with EnvironmentPool(url, None, "json", timeout_s=20) as environments:
        yield environments


async def test_all_steps_after_a_reply_are_its_own(pool):
    async with pool.session(TASK) as session:
        trajectory = Trajectory(TASK, 0)
        environment = EpisodeEnvironment(session, trajectory)
        await environment.reset()
        for actions in (["go", "what", "go please"], ["please"]):
            trajectory.turns.append(Turn(0, 0, 0, "", ""))
            for action in actions:
                await environment.step(action)
    first, second = trajectory.turns
    assert first.reward == 1.0 - 0.25 + 1.5
    assert first.reward_parts == {"moved": 2.0, "polite": 0.5}
    assert first.format_penalty == -0.25
    assert not first.action_is_valid, "the environment could not read one of them"
    assert first.anchor == "state 0", "where the reply was given"
    assert (second.reward, second.reward_parts, second.anchor) == (0.5, {"polite": 0.5}, "state 3")
    assert second.action_is_valid


class Session:
    """A session whose steps are answered when they are told to be, or fail."""

    env = SimpleNamespace(metadata={}, kind="episodic")

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem
        self.asked, self.go_on = asyncio.Event(), asyncio.Event()

    async def step(self, action: str) -> tuple[Any, ...]:
        if self.problem is not None:
            raise self.problem
        self.asked.set()
        await self.go_on.wait()
        return "board", 1.0, True, False, {"success": True}


def environment_of(session: Session) -> tuple[EpisodeEnvironment, Trajectory]:
    trajectory = Trajectory(TASK, 0, turns=[Turn(0, 0, 0, "", "")])
    return EpisodeEnvironment(cast(EnvSession, session), trajectory), trajectory


async def test_a_step_under_way_has_its_answer_before_the_episode_ends_and_no_other_begins():
    session = Session()
    environment, trajectory = environment_of(session)
    steps = [asyncio.create_task(environment.step("go")) for _ in range(2)]
    await session.asked.wait()
    closing = asyncio.create_task(environment.close())
    await asyncio.sleep(0)
    assert not closing.done()
    session.go_on.set()
    await closing
    assert (await steps[0]).terminated
    for late in (steps[1], environment.step("go")):
        with pytest.raises(ApiError) as refused:
            await late
        assert refused.value.status == 410
    assert (environment.steps, trajectory.outcome) == (1, TrajectoryOutcome.SOLVED)


@pytest.mark.parametrize(
    "problem", [ConnectionError("no server"), TimeoutError("no answer"), WriteError("no space for the log")]
)
async def test_what_ends_the_run_is_not_taken_for_what_the_agent_did(problem):
    environment, trajectory = environment_of(Session(problem))
    for _ in range(2):
        with pytest.raises(ApiError, match=str(problem)):
            await environment.step("go")
    agent = SimpleNamespace(counts=SessionCounts(), model_failure=None)
    with pytest.raises(type(problem), match=str(problem)):
        conclude(trajectory, agent, environment, AgentEnd("the agent gave up"), 5)
