"""GiGPO: an episode's advantage in its group plus a step's advantage among steps from the same state."""

import difflib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantages import group_advantages
from rollgym.trainer.algorithms.modes import Scale, Singleton
from rollgym.trainer.algorithms.rewards import TurnValues, discounted_turn_returns


def anchor_groups(
    anchors: Sequence[Sequence[str | None]], groups: Sequence[int], similarity: float | None = None
) -> Tensor:
    """Return the anchor group of each step: which steps of a prompt group began in the same state.

    They stand in the order of trajectories and of turns in them.

    Args:
        anchors: Key of each turn of each trajectory; a step whose key is None is in a group of its own.
        groups: Prompt group of each trajectory; steps of different groups never meet.
        similarity: None groups equal keys. A number puts a step into the first anchor group whose first member is
            at least that similar; this depends on the order of the steps by design. It is difflib's ratio of (key,
            first member), in this order as in the authors' code: the ratio is not symmetric.
    """
    cluster: list[int] = []
    count = 0
    exact: dict[tuple[int, str], int] = {}
    representatives: dict[int, list[tuple[str, int]]] = {}
    for group, keys in zip(groups, anchors, strict=True):
        known = representatives.setdefault(group, [])
        for key in keys:
            index = None
            if key is not None:
                index = exact.get((group, key))
                if similarity is not None:
                    index = _similar(key, known, similarity)
            if index is None:
                index, count = count, count + 1
                if key is not None:
                    exact[group, key] = index
                    known.append((key, index))
            cluster.append(index)
    return torch.tensor(cluster, dtype=torch.int64)


def gigpo_advantages(
    rewards: Sequence[Sequence[float]],
    groups: Sequence[int],
    anchors: Tensor,
    *,
    charges: Sequence[Sequence[float]] | None = None,
    normalise_std: bool = False,
    step_weight: float = 1.0,
    turn_discount: float = 0.95,
    count_steps: bool = True,
    singleton_raw: bool = False,
    epsilon: float = 1e-6,
) -> TurnValues:
    """Return one advantage per turn: the episode's plus `step_weight` times the step's.

    Args:
        rewards: Reward of each turn of each trajectory.
        groups: Prompt group of each trajectory.
        anchors: Anchor group of each step, from `anchor_groups`.
        charges: Added to each turn's own return after discounting, and to the episode's return as that turn sees it
            (over trajectories: their sum); nothing if None.
        normalise_std: Divide by the deviation (mean_std_norm), on both levels.
        step_weight: Omega.
        turn_discount: Discount of step returns; the episode's return has none.
        count_steps: In the episode statistics each step of a trajectory counts once (the authors' code), or each
            trajectory once (their paper).
        singleton_raw: Episode advantage in a group of one is the return itself, or 0. With `count_steps` a group of
            one is one step, not one trajectory of several.
        epsilon: Added to deviations.
    """
    scale: Scale = "group_std" if normalise_std else "none"
    episode = _episode_advantages(
        rewards,
        groups,
        charges,
        count_steps=count_steps,
        scale=scale,
        singleton="raw" if singleton_raw else "zero",
        epsilon=epsilon,
    )
    returns = _flat([discounted_turn_returns(turns, turn_discount) for turns in rewards])
    if charges is not None:
        returns = returns + _flat(charges)
    step = group_advantages(returns, anchors, scale=scale, epsilon=epsilon)
    total = iter((episode + step_weight * step).tolist())
    return [[next(total) for _ in turns] for turns in rewards]


def _episode_advantages(
    rewards: Sequence[Sequence[float]],
    groups: Sequence[int],
    charges: Sequence[Sequence[float]] | None,
    *,
    count_steps: bool,
    scale: Scale,
    singleton: Singleton,
    epsilon: float,
) -> Tensor:
    """Return the advantage of each turn's episode, float64, an entry per turn."""
    relative = partial(group_advantages, scale=scale, singleton=singleton, epsilon=epsilon)
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    scores = torch.tensor([sum(turns) for turns in rewards], dtype=torch.float64)
    group = torch.tensor(groups, dtype=torch.int64)
    if charges is not None and count_steps:
        # Each step is a sample with a score of its own.
        return relative(scores.repeat_interleave(lengths) + _flat(charges), group.repeat_interleave(lengths))
    if charges is not None:
        scores = scores + torch.tensor([sum(turns) for turns in charges], dtype=torch.float64)
    return relative(scores, group, counts=lengths if count_steps else None).repeat_interleave(lengths)


def _flat(turns: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([value for part in turns for value in part], dtype=torch.float64)


def _similar(key: str, known: Sequence[tuple[str, int]], threshold: float) -> int | None:
    for representative, index in known:
        if key == representative or _reaches(difflib.SequenceMatcher(None, key, representative), threshold):
            return index
    return None


def _reaches(matcher: difflib.SequenceMatcher[str], threshold: float) -> bool:
    # The quick ratios are upper bounds of the ratio, which is quadratic in the length of the texts.
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
    return all(bound() >= threshold for bound in bounds)
