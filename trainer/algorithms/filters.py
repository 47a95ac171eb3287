"""Which groups are trained on: by how much the returns of their members differ, and other scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TypeGuard, assert_never

import torch

from rollgym.trainer.algorithms.advantages import NO_DEVIATION, group_statistics
from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import (
    CustomFilter,
    FilterSettings,
    GroupwiseFilter,
    MinPFilter,
    RankedFilter,
    TopCountFilter,
    TopFractionFilter,
    TopPFilter,
)
from rollgym.trainer.core.plugins import Plugin, load_plugin

_Ranked = TopFractionFilter | TopCountFilter | TopPFilter | MinPFilter
_ZERO = 1e-10
"""A score up to this is none (RAGEN)."""


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
        lengths: Sampled tokens of each trajectory; read where groups are ranked by length only.
        batch: All of it, for a user's filter that asks for it.

    Raises:
        PluginError: If a user's filter keeps what is no group of the batch.
    """
    sizes: dict[int, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    statistics = group_statistics(torch.tensor(returns, dtype=torch.float64), torch.tensor(groups))
    std = dict(zip(groups, statistics.std.tolist(), strict=True))
    mean = dict(zip(groups, statistics.mean.tolist(), strict=True))
    match settings.kind:
        case "none":
            kept = set(sizes)
        case "zero_variance":
            kept = {group for group in sizes if sizes[group] == 1 or std[group] > settings.tolerance}
        case "success_range":
            share = _shares(groups, solved)
            kept = {group for group in sizes if settings.above < share[group] < settings.below}
        case "score_range":
            kept = {group for group in sizes if settings.above < mean[group] < settings.below}
        case "top_fraction" | "top_count" | "top_p" | "min_p":
            scores = _scores(settings, groups, std, mean, sizes, lengths)
            kept = _best(settings, scores, len(sizes))
        case "custom":
            kept = _chosen(settings, groups, returns, batch)
        case _:
            assert_never(settings)
    return FilterResult(
        kept=[group for group in sizes if group in kept],
        dropped={group: settings.kind for group in sizes if group not in kept},
        std=std,
    )


def _scores(
    settings: RankedFilter,
    groups: Sequence[int],
    std: dict[int, float],
    mean: dict[int, float],
    sizes: dict[int, int],
    lengths: Sequence[int],
) -> dict[int, float]:
    """Return what groups are ranked by, in the order in which they first occur."""
    match settings.by:
        case "deviation":
            scores = std
        case "mean":
            scores = mean
        case "sum":
            scores = {group: mean[group] * sizes[group] for group in sizes}
        case "length":
            scores = _means(groups, [float(length) for length in lengths])
        case _:
            assert_never(settings.by)
    return {group: scores[group] for group in sizes if settings.include_zero or abs(scores[group]) > _ZERO}


def _best(settings: _Ranked, scores: dict[int, float], groups: int) -> set[int]:
    """Return the groups that a ranking keeps (RAGEN's rollout_filter.py); ties stay in order of occurrence."""
    sign = -1 if settings.keep == "largest" else 1
    ranked = sorted(scores, key=lambda group: sign * scores[group])
    match settings:
        case TopFractionFilter():
            return set(ranked[: max(1, int(settings.fraction * groups))])
        case TopCountFilter():
            return set(ranked[: settings.count])
        case TopPFilter():
            return _top_p(settings, ranked, scores)
        case MinPFilter():
            return _min_p(settings, ranked, scores)


def _min_p(settings: MinPFilter, ranked: Sequence[int], scores: dict[int, float]) -> set[int]:
    if not ranked:
        return set()
    first = scores[ranked[0]]
    if settings.keep == "smallest":
        bound = first / (settings.fraction + _ZERO) + _ZERO
        return {group for group in ranked if scores[group] <= bound}
    return {group for group in ranked if first > 0 and scores[group] >= settings.fraction * first - _ZERO}


def _means(groups: Sequence[int], values: Sequence[float]) -> dict[int, float]:
    of_groups: dict[int, list[float]] = {}
    for group, value in zip(groups, values, strict=True):
        of_groups.setdefault(group, []).append(value)
    return {group: sum(each) / len(each) for group, each in of_groups.items()}


def _shares(groups: Sequence[int], solved: Sequence[bool]) -> dict[int, float]:
    return _means(groups, [float(flag) for flag in solved])


def _chosen(
    settings: CustomFilter,
    groups: Sequence[int],
    returns: Sequence[float],
    batch: TrajectoryBatch | None,
) -> set[int]:
    plugin: Plugin = load_plugin(settings.function, "algorithm.filter.function")
    if settings.sees == "batch":
        if batch is None:
            raise ValueError("the filter asks for the whole batch, which is not given")
        given = plugin(batch.copied())
    else:
        given = plugin([*groups], [*returns])
    chosen = plugin.elements(given, "the numbers of the groups to keep", ordered=False)
    # A list of flags would otherwise be read as groups 0 and 1.
    if any(isinstance(each, bool) or not isinstance(each, Integral) for each in chosen):
        raise plugin.broken("must return the numbers of the groups to keep")
    if strangers := set(chosen) - set(groups):
        raise plugin.broken(f"keeps unknown groups {sorted(strangers)}")
    return set(chosen)


def _top_p(settings: TopPFilter, ranked: Sequence[int], scores: dict[int, float]) -> set[int]:
    """Return the first groups of a ranking that make up a part of all scores; none if these are not reached."""
    if settings.shares == "softmax":
        return _top_p_softmax(settings, ranked, scores)
    target = settings.mass * sum(scores[group] for group in ranked) - settings.slack
    kept: set[int] = set()
    reached = 0.0
    for group in ranked:
        if reached >= target or scores[group] <= NO_DEVIATION:
            break
        kept.add(group)
        reached += scores[group]
    return kept if reached >= target else set()


def _top_p_softmax(settings: TopPFilter, ranked: Sequence[int], scores: dict[int, float]) -> set[int]:
    if not ranked:
        return set()
    sign = 1 if settings.keep == "largest" else -1
    shares = torch.softmax(torch.tensor([sign * scores[group] for group in ranked], dtype=torch.float64), 0)
    reached = shares.cumsum(0)
    count = int((reached < settings.mass).sum()) + 1
    return set(ranked[:count])
