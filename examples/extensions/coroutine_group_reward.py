"""A reward over a whole group that waits: `rollout.group_reward=examples.extensions.coroutine_group_reward:ranked`."""

import asyncio
from collections.abc import Sequence

from rollgym import Trajectory


async def ranked(group: Sequence[Trajectory]) -> list[list[float]]:
    """At the end of each episode its place in the group, from 0 for the worst to 1, as a judge that compares gives it.

    Args:
        group: Episodes of one task; other groups go on while this one waits.

    Returns:
        For each episode, one number for each turn.
    """
    await asyncio.sleep(0)  # here: a call of the judge
    order = sorted(range(len(group)), key=lambda place: group[place].total_reward)
    share = {place: rank / max(len(group) - 1, 1) for rank, place in enumerate(order)}
    rewards = [[0.0] * len(each.turns) for each in group]
    for place, numbers in enumerate(rewards):
        if numbers:
            numbers[-1] = share[place]
    return rewards
