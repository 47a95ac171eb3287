"""Steps that an agent takes on its own: what they earn belongs to the policy's last reply, all of it."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.processes import env_server
from trainer.records.trajectory import Trajectory, Turn
from trainer.rollout.agents.environment import EpisodeEnvironment
from trainer.rollout.environments import EnvironmentPool
from trainer.tasks.task import Task

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
