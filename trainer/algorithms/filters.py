"""Which groups are trained on, by how much the returns of their members differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard, assert_never

import torch

from trainer.algorithms.advantages import NO_DEVIATION, group_statistics
from trainer.algorithms.settings import FilterSettings, GroupwiseFilter
from trainer.core.plugins import Plugin, load_plugin


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
    settings: FilterSettings, groups: Sequence[int], returns: Sequence[float], solved: Sequence[bool] = ()
) -> FilterResult:
    """Choose groups by the standard deviation of their returns (unbiased, in float64), or by how many are solved.

    Args:
        settings: Which filter.
        groups: Group of each trajectory.
        returns: Return of each trajectory.
        solved: Whether each trajectory reached its goal; read by `success_range` only.

    Raises:
        PluginError: If a user's filter keeps what is no group of the batch.
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
        case "success_range":
            share = _shares(groups, solved)
            kept = {group for group in sizes if settings.above < share[group] < settings.below}
        case "top_fraction":
            kept = set(ranked[: max(1, int(settings.fraction * len(ranked)))])
        case "top_p":
            kept = _top_p(ranked, std, settings.mass, settings.slack)
        case "min_p":
            largest = max(std.values(), default=0.0)
            kept = {group for group in sizes if largest > 0 and std[group] >= settings.fraction * largest}
        case "custom":
            kept = _chosen(load_plugin(settings.function, "algorithm.filter.function"), groups, returns)
        case _:
            assert_never(settings)
    return FilterResult(
        kept=[group for group in sizes if group in kept],
        dropped={group: settings.kind for group in sizes if group not in kept},
        std=std,
    )


def _shares(groups: Sequence[int], solved: Sequence[bool]) -> dict[int, float]:
    flags: dict[int, list[bool]] = {}
    for group, flag in zip(groups, solved, strict=True):
        flags.setdefault(group, []).append(flag)
    return {group: sum(each) / len(each) for group, each in flags.items()}


def _chosen(plugin: Plugin, groups: Sequence[int], returns: Sequence[float]) -> set[int]:
    chosen = plugin.elements(plugin(groups, returns), "the numbers of the groups to keep")
    # A list of flags would otherwise be read as groups 0 and 1.
    if any(isinstance(each, bool) or not isinstance(each, Integral) for each in chosen):
        raise plugin.broken("must return the numbers of the groups to keep")
    if strangers := set(chosen) - set(groups):
        raise plugin.broken(f"keeps unknown groups {sorted(strangers)}")
    return set(chosen)


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
