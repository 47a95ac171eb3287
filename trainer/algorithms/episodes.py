"""Which episodes of the groups that are kept are trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from torch import Tensor

from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import (
    CustomEpisodes,
    EpisodeSettings,
    ResampledEpisodes,
    ShortestEpisodes,
)
from rollgym.trainer.core.plugins import load_plugin


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
