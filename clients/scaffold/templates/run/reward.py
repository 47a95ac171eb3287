"""The reward of this run: `rollout.reward: reward:rewards` in run.yaml."""

from rollgym import Trajectory

COST_OF_A_TURN = 0.0  # 0.02 makes a short episode worth more than a long one


def rewards(trajectory: Trajectory) -> list[float]:
    """Return one number for each turn: the environment's reward, less the cost of a turn.

    Args:
        trajectory: The episode. Each of its `turns` has `observation`, `reply`, `reward`
            and `action_is_valid`; `trajectory.outcome` says how the episode ended.
    """
    return [turn.reward - COST_OF_A_TURN for turn in trajectory.turns]
