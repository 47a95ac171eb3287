"""Several rewards, each relative to its group (GDPO, arXiv:2601.05242)."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantages import group_advantages
from rollgym.trainer.algorithms.modes import Scale


def gdpo_advantages(
    scores: Tensor,
    groups: Tensor,
    *,
    weights: Sequence[float] | None = None,
    scale: Scale = "group_std",
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = 1e-6,
) -> Tensor:
    """Return the weighted sum of each reward's advantages in its group, float64 `[trajectories]` (equations 4 and 5).

    The batch's normalisation that follows (equation 6) is `advantages.whitened` over tokens in verl, and
    `(A - mean) / (deviation + 1e-4)` over trajectories in TRL: `group_advantages` with one group for all.

    Args:
        scores: A row for each reward, `[rewards, trajectories]`.
        groups: Group of each trajectory.
        weights: Of each reward; 1 if None.
        scale: As in `group_advantages`, and so are the following.
        singleton: In a group of one.
        epsilon: Added to deviations.
    """
    factors = [1.0] * len(scores) if weights is None else weights
    total = torch.zeros(scores.shape[1:], dtype=torch.float64)
    for factor, each in zip(factors, scores, strict=True):
        total += factor * group_advantages(each, groups, scale=scale, singleton=singleton, epsilon=epsilon)
    return total
