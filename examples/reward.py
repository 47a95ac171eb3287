"""A reward of one's own: `rollout.reward=examples.reward:sooner_is_better`."""

from rollgym import Trajectory

COST_OF_A_TURN = 0.02


def sooner_is_better(trajectory: Trajectory) -> list[float]:
    """The environment's rewards, less a little for every turn.

    Args:
        trajectory: The episode: `turns` with `observation`, `reply`, `reward` and `action_is_valid`, and the `outcome`.

    Returns:
        One number for each turn.
    """
    return [turn.reward - COST_OF_A_TURN for turn in trajectory.turns]
