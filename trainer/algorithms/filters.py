"""Which groups are trained on, by how much the returns of their members differ."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from trainer.algorithms.advantages import NO_DEVIATION, group_statistics
from trainer.algorithms.settings import FilterSettings
from trainer.plugins import load_attribute

GroupFilter = Callable[[Sequence[int], Sequence[float]], Iterable[int]]


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


def filter_groups(settings: FilterSettings, groups: Sequence[int], returns: Sequence[float]) -> FilterResult:
    """Choose groups by the standard deviation of their returns (unbiased, in float64).

    Args:
        settings: Which filter.
        groups: Group of each trajectory.
        returns: Return of each trajectory.

    Raises:
        ValueError: If a user's filter keeps a group that is not there.
    """
    sizes: dict[int, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    statistics = group_statistics(torch.tensor(returns, dtype=torch.float64), torch.tensor(groups))
    std = dict(zip(groups, statistics.std.tolist(), strict=True))
    ranked = sorted(sizes, key=lambda group: -std[group])  # stable: ties stay in order of occurrence
    match settings.kind:
        case "none":
            kept = set(sizes)
        case "zero_variance":
            kept = {group for group in sizes if sizes[group] == 1 or std[group] > settings.tolerance}
        case "top_fraction":
            kept = set(ranked[: max(1, int(settings.fraction * len(ranked)))])
        case "top_p":
            kept = _top_p(ranked, std, settings.mass, settings.slack)
        case "min_p":
            largest = max(std.values(), default=0.0)
            kept = {group for group in sizes if largest > 0 and std[group] >= settings.fraction * largest}
        case "custom":
            chosen: GroupFilter = load_attribute(settings.function)
            kept = set(chosen(groups, returns))
            if strangers := kept - set(sizes):
                raise ValueError(f"filter {settings.function} keeps unknown groups {sorted(strangers)}")
        case _:
            assert_never(settings)
    return FilterResult(
        kept=[group for group in sizes if group in kept],
        dropped={group: settings.kind for group in sizes if group not in kept},
        std=std,
    )


def _top_p(ranked: Sequence[int], std: dict[int, float], mass: float, slack: float) -> set[int]:
    target = mass * sum(std[group] for group in ranked) - slack
    kept: set[int] = set()
    reached = 0.0
    for group in ranked:
        if reached >= target or std[group] <= NO_DEVIATION:
            break
        kept.add(group)
        reached += std[group]
    return kept if reached >= target else set()
