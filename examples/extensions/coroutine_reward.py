"""A reward that waits for something: `rollout.reward=examples.extensions.coroutine_reward:judged`."""

import asyncio

from rollgym import Trajectory


async def judged(trajectory: Trajectory) -> list[float]:
    """The environment's rewards, and a tenth for a short reply, from a service that takes its time.

    Args:
        trajectory: The episode; other episodes go on while this one waits.

    Returns:
        One number for each turn.
    """
    await asyncio.sleep(0)  # here: a call of the service
    return [turn.reward + 0.1 * (len(turn.reply) < 8) for turn in trajectory.turns]
