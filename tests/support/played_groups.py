"""Episodes as they come from rollouts, for whoever trains on them."""

import pickle
from dataclasses import replace
from functools import cache

import numpy as np

from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Segment, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.tasks.task import Task
from tests.support.tiny_models import reference_logprobs, sharp_model


def played_groups(model, groups=3, members=4, seed=0) -> list[Group]:
    """Episodes of random tokens, of unequal length, with the log-probabilities that `model` gives them."""
    draws = np.random.default_rng(seed)
    result = []
    for index in range(groups):
        task = Task(index, "Any-v0", seed=index)
        group = Group(index, task, 0)
        for member in range(members):
            trajectory = Trajectory(task, member, outcome=TrajectoryOutcome.FAILED)
            segment = Segment()
            for turn in range(int(draws.integers(1, 4))):
                segment.append_context(draws.integers(2, 40, 3).tolist())
                start = len(segment.ids)
                reply = draws.integers(2, 40, int(draws.integers(1, 4))).tolist()
                segment.append_action(reply, [0.0] * len(reply), [0] * len(reply), turn)
                anchor = str(draws.integers(2))
                reward = float(draws.integers(2))
                trajectory.turns.append(
                    Turn(0, start, len(segment.ids), "", "", reward=reward, anchor=anchor)
                )
            exact = [0.0, *reference_logprobs(model, segment.ids)]
            segment.behaviour_logprobs = [
                value if used else 0.0 for value, used in zip(exact, segment.action_mask, strict=True)
            ]
            trajectory.segments.append(segment)
            group.trajectories.append(trajectory)
        result.append(group)
    return result


def sharp_groups(groups=3, members=4) -> list[Group]:
    """Episodes that the sharp model might have played: they are made once, and each caller has a copy."""
    return pickle.loads(_pickled(groups, members))


@cache
def _pickled(groups: int, members: int) -> bytes:
    return pickle.dumps(played_groups(sharp_model(), groups, members))


def with_all_that_presets_read(groups: list[Group]) -> list[Group]:
    """Add what single presets read besides: a greedy episode of each group, and rewards by name."""
    for group in groups:
        group.greedy = replace(group.trajectories[0], member=99)
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                turn.reward_parts = {"won": turn.reward, "short": float(turn.end - turn.start < 3)}
    return groups
