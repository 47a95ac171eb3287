"""Episodes that our own client has solved, for others to play again."""

from typing import Any, NamedTuple

from rollgym.clients.client.client import EnvClient


class Solved(NamedTuple):
    """An episode: its actions, and what they led to, the first observation included."""

    actions: list[str]
    observations: list[str]
    rewards: list[float]


async def solve(url: str, env_id: str, seed: int) -> Solved:
    """Play an episode as the environment's expert says, to its end."""
    async with EnvClient(url) as client:
        session = await client.make(env_id)
        began = await session.reset(seed=seed, options={"expert": True})
        solved = Solved([], [began.observation], [])
        info: dict[str, Any] = dict(began.info)
        while True:
            solved.actions.append(info["expert_action"])
            step = await session.step(solved.actions[-1])
            solved.observations.append(step.observation)
            solved.rewards.append(step.reward)
            if step.terminated:
                assert step.info["success"]
                await session.close()
                return solved
            info = dict(step.info)
