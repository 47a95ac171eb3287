"""HGPO: steps are compared with those of equal state, and of ever longer equal history (arXiv:2602.22817)."""

from collections.abc import Sequence

import torch

from rollgym.trainer.algorithms.advantages import group_advantages
from rollgym.trainer.algorithms.rewards import TurnValues, charged_turn_returns
from rollgym.trainer.core.numbers import NO_DEVIATION

_Step = tuple[int, int]
_SAME = 1e-9
"""An advantage up to this is none, and has no part in the mean."""


def hgpo_advantages(
    rewards: Sequence[Sequence[float]],
    groups: Sequence[int],
    anchors: Sequence[Sequence[str | None]],
    *,
    charges: Sequence[Sequence[float]] | None = None,
    normalise_std: bool = True,
    history: int = 2,
    length_weight: float = 1.0,
    episode_group: bool = False,
    turn_discount: float = 0.95,
    epsilon: float = 1e-6,
) -> TurnValues:
    """Return one advantage per turn: the weighted mean of its advantages in all groups that it is part of.

    A step is in a group with the steps of its prompt group whose last k states, its own included, are equal, for k from
    1 to `history + 1`. In each it has the advantage of its discounted return; groups of one, and advantages of 0, do
    not count. The weight of k is `(k + 1)^length_weight`.

    Args:
        rewards: Reward of each turn of each trajectory.
        groups: Prompt group of each trajectory; steps of different groups never meet.
        anchors: Key of the state in which each turn began; one that is None is equal to no other.
        charges: Added to each turn's own return after discounting; nothing if None.
        normalise_std: Divide by the deviation, which is biased as in the authors' code.
        history: States before the current one that the longest histories hold (K).
        length_weight: Alpha.
        episode_group: Whether the episode's advantage among all steps of the group takes part, with k = 0.
        turn_discount: Discount of step returns.
        epsilon: Added to deviations, and to the sum of the weights.
    """
    returns = charged_turn_returns(rewards, charges, turn_discount)
    found: dict[_Step, list[tuple[int, float]]] = {}
    if episode_group:
        for step, value in _episode_advantages(
            rewards, groups, normalise_std=normalise_std, epsilon=epsilon
        ).items():
            found.setdefault(step, []).append((0, value))
    for (length, _, _), members in _histories(groups, anchors, history).items():
        values = torch.tensor([returns[row][turn] for row, turn in members], dtype=torch.float64)
        for step, value in zip(members, _relative(values, normalise_std, epsilon), strict=True):
            found.setdefault(step, []).append((length, value))
    return [
        [_mixed(found.get((row, turn), []), length_weight, epsilon) for turn in range(len(turns))]
        for row, turns in enumerate(rewards)
    ]


def _histories(
    groups: Sequence[int], anchors: Sequence[Sequence[str | None]], history: int
) -> dict[tuple[int, int, tuple[str, ...]], list[_Step]]:
    """Return the steps that share their last k states, by k, group and these states."""
    clusters: dict[tuple[int, int, tuple[str, ...]], list[_Step]] = {}
    for row, (group, keys) in enumerate(zip(groups, anchors, strict=True)):
        for turn in range(len(keys)):
            states: tuple[str, ...] = ()
            for length in range(1, min(history, turn) + 2):
                state = keys[turn - length + 1]
                if state is None:
                    break
                states = (state, *states)
                clusters.setdefault((length, group, states), []).append((row, turn))
    return {key: members for key, members in clusters.items() if len(members) > 1}


def _relative(values: torch.Tensor, normalise_std: bool, epsilon: float) -> list[float]:
    deviation = float(values.std(unbiased=False))
    if deviation <= NO_DEVIATION:
        return [0.0] * len(values)
    centred = values - values.mean()
    relative: list[float] = (centred / (deviation + epsilon) if normalise_std else centred).tolist()
    return relative


def _episode_advantages(
    rewards: Sequence[Sequence[float]], groups: Sequence[int], *, normalise_std: bool, epsilon: float
) -> dict[_Step, float]:
    """Return each step's episode advantage, with every step of an episode counted once."""
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    advantages = group_advantages(
        torch.tensor([sum(turns) for turns in rewards], dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        scale="group_std" if normalise_std else "none",
        singleton="raw",
        epsilon=epsilon,
        counts=lengths,
    ).tolist()
    return {(row, turn): advantages[row] for row, turns in enumerate(rewards) for turn in range(len(turns))}


def _mixed(found: Sequence[tuple[int, float]], length_weight: float, epsilon: float) -> float:
    says = [(float((length + 1) ** length_weight), value) for length, value in found if abs(value) > _SAME]
    total = sum(weight for weight, _ in says) + epsilon
    return sum(weight * value for weight, value in says) / total
