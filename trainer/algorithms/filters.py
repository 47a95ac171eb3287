"""Which groups are trained on: by how much the returns of their members differ, and other scores."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from rollgym.trainer.algorithms.advantages import group_statistics
from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.group_filters import FilterSettings, GroupwiseFilter, JudgedGroups


@dataclass(frozen=True, slots=True)
class FilterResult:
    """The outcome of a filter.

    Attributes:
        kept: Groups to train on, in the order in which they first occur.
        dropped: Reason per dropped group.
        std: Deviation of the returns of each group; 0 for a group of one.
    """

    kept: list[int]
    dropped: dict[int, str]
    std: dict[int, float]


def refills(settings: FilterSettings) -> TypeGuard[GroupwiseFilter]:
    """Whether groups are judged one by one as they end, and others take the place of those that are dropped."""
    return isinstance(settings, GroupwiseFilter) and settings.refill


def filter_groups(
    settings: FilterSettings,
    groups: Sequence[int],
    returns: Sequence[float],
    solved: Sequence[bool] = (),
    lengths: Sequence[int] = (),
    batch: TrajectoryBatch | None = None,
) -> FilterResult:
    """Choose groups by their returns (deviations unbiased, in float64), by their lengths, or by how many are solved.

    Args:
        settings: Which filter.
        groups: Group of each trajectory.
        returns: Return of each trajectory.
        solved: Whether each trajectory reached its goal; read by `success_range` only.
        lengths: Sampled tokens of each trajectory; read only if groups are ranked by length.
        batch: All of it, for a user's filter that asks for it.

    Raises:
        PluginError: If a user's filter keeps a group that the batch does not have.
    """
    sizes = dict(Counter(groups))
    statistics = group_statistics(torch.tensor(returns, dtype=torch.float64), torch.tensor(groups))
    std = dict(zip(groups, statistics.std.tolist(), strict=True))
    mean = dict(zip(groups, statistics.mean.tolist(), strict=True))
    kept = settings.kept(JudgedGroups(groups, returns, solved, lengths, sizes, mean, std, batch))
    return FilterResult(
        kept=[group for group in sizes if group in kept],
        dropped={group: settings.kind for group in sizes if group not in kept},
        std=std,
    )
