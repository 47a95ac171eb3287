"""Which groups are trained on, by how much the returns of their members differ or other scores; and which episodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantages import group_statistics
from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import (
    CustomEpisodes,
    EpisodeSettings,
    ResampledEpisodes,
    ShortestEpisodes,
)
from rollgym.trainer.algorithms.group_filters import FilterSettings, GroupwiseFilter, JudgedGroups
from rollgym.trainer.core.plugins import load_plugin


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


@dataclass(frozen=True, slots=True)
class EpisodeChoice:
    """The outcome of a choice.

    Attributes:
        kept: Whether each trajectory is trained on.
        in_statistics: Whether the others still count in the statistics of their groups.
    """

    kept: list[bool]
    in_statistics: bool


def choose_episodes(
    settings: EpisodeSettings, batch: TrajectoryBatch, returns: Sequence[float]
) -> EpisodeChoice:
    """Choose the episodes that are trained on.

    Args:
        settings: Which.
        batch: All episodes.
        returns: Return of each.

    Raises:
        PluginError: If a function of the user's fails, or does not say it of each.
    """
    match settings.kind:
        case "all":
            return EpisodeChoice([True] * len(batch), in_statistics=True)
        case "finished":
            cut = batch.truncated or [False] * len(batch)
            return EpisodeChoice([not each for each in cut], settings.in_statistics)
        case "resample_on_correct":
            return EpisodeChoice(_resampled(settings, batch, returns), in_statistics=False)
        case "shortest":
            return EpisodeChoice(_shortest(settings, batch, returns), in_statistics=False)
        case "custom":
            return EpisodeChoice(_custom(settings, batch), settings.in_statistics)


def resampled_on_correct(
    returns: Sequence[float],
    penalties: Sequence[float],
    size: int,
    *,
    score_threshold: float = 0.0,
    at_least: int = 1,
) -> list[int]:
    """Return the indices of the episodes of one group that are kept (GRPO-RoC, arXiv:2508.20722, section 3.2).

    Successes and failures keep their shares of the group. Of the successes those of the smallest penalties stay; of the
    failures the first ones.

    Args:
        returns: Return of each episode.
        penalties: How unclean each is.
        size: How many are kept; a group of at most this size is kept whole.
        score_threshold: A success has a larger return than this.
        at_least: Fewest successes, and fewest failures, that are kept; all of them if there are fewer.
    """
    count = len(returns)
    if count <= size:
        return list(range(count))
    good = sorted((at for at in range(count) if returns[at] > score_threshold), key=lambda at: penalties[at])
    bad = [at for at in range(count) if returns[at] <= score_threshold]
    wins = round(len(good) * size / count)
    wins = max(wins, min(at_least, len(good)))
    wins = min(wins, size - min(at_least, len(bad), size))
    wins = min(max(wins, size - len(bad)), len(good))
    return sorted([*good[:wins], *bad[: size - wins]])


def shortest(
    lengths: Sequence[int], returns: Sequence[float], size: int, *, per_token: bool = False
) -> list[int]:
    """Return the indices of the episodes of one group that are kept (GFPO, arXiv:2508.09726, section 3).

    Args:
        lengths: Sampled tokens of each episode.
        returns: Return of each.
        size: How many are kept; of equal ones the first.
        per_token: Whether those of the largest return for each token are, and not the shortest.
    """
    if per_token:
        order = sorted(range(len(lengths)), key=lambda at: -returns[at] / max(lengths[at], 1))
    else:
        order = sorted(range(len(lengths)), key=lambda at: lengths[at])
    return sorted(order[:size])


def _members(batch: TrajectoryBatch) -> list[list[int]]:
    """Return the indices of the episodes of each group."""
    members: dict[int, list[int]] = {}
    for index, group in enumerate(batch.groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def _shortest(settings: ShortestEpisodes, batch: TrajectoryBatch, returns: Sequence[float]) -> list[bool]:
    kept = [False] * len(batch)
    for indices in _members(batch):
        lengths = [sum(batch.tokens[index]) for index in indices]
        per_token = settings.by == "return_per_token"
        for at in shortest(
            lengths, [returns[index] for index in indices], settings.size, per_token=per_token
        ):
            kept[indices[at]] = True
    return kept


def _resampled(settings: ResampledEpisodes, batch: TrajectoryBatch, returns: Sequence[float]) -> list[bool]:
    kept = [False] * len(batch)
    for indices in _members(batch):
        chosen = resampled_on_correct(
            [returns[index] for index in indices],
            [_unreadable(batch.valid[index]) for index in indices],
            settings.size,
            score_threshold=settings.score_threshold,
            at_least=settings.at_least,
        )
        for at in chosen:
            kept[indices[at]] = True
    return kept


def _unreadable(valid: Sequence[bool]) -> float:
    return sum(not each for each in valid) / max(len(valid), 1)


def _custom(settings: CustomEpisodes, batch: TrajectoryBatch) -> list[bool]:
    plugin = load_plugin(settings.function, "algorithm.episodes.function")
    expected = "whether each trajectory is kept"
    flags = [
        flag.item() if isinstance(flag, np.generic | Tensor) and flag.ndim == 0 else flag
        for flag in plugin.elements(plugin(batch.copied()), expected)
    ]
    if len(flags) != len(batch) or not all(isinstance(flag, bool | Real) for flag in flags):
        raise plugin.broken(f"must return {expected}: {len(batch)} truth values")
    return [bool(flag) for flag in flags]
