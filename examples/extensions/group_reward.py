"""A reward over a whole group: `rollout.group_reward=examples.extensions.group_reward:shortest_wins`."""

from collections.abc import Sequence

from rollgym import Trajectory


def shortest_wins(group: Sequence[Trajectory]) -> list[list[float]]:
    """The environment's rewards, and a half at the end of the episodes of the fewest turns among those that solved it.

    Args:
        group: Episodes of one task.

    Returns:
        For each episode, one number for each turn.
    """
    turns = [len(each.turns) for each in group if each.success]
    rewards = [[turn.reward for turn in each.turns] for each in group]
    for each, numbers in zip(group, rewards, strict=True):
        if each.success and len(each.turns) == min(turns):
            numbers[-1] += 0.5
    return rewards
