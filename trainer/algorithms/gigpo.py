"""GiGPO: an episode's advantage in its group plus a step's advantage among steps from the same state."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.advantages import Scale, group_advantages
from trainer.algorithms.rewards import TurnValues, discounted_turn_returns


@dataclass(frozen=True, slots=True)
class AnchorGroups:
    """Which steps began in the same state.

    Attributes:
        cluster: Anchor group of each step, in the order of trajectories and of turns in them.
        singletons: How many steps are alone in their anchor group.
    """

    cluster: Tensor
    singletons: int


def anchor_groups(
    anchors: Sequence[Sequence[str | None]], groups: Sequence[int], similarity: float | None = None
) -> AnchorGroups:
    """Group the steps of each prompt group by the state in which they began.

    Args:
        anchors: Key of each turn of each trajectory; a step whose key is None is in a group of its own.
        groups: Prompt group of each trajectory; steps of different groups never meet.
        similarity: None groups equal keys. A number puts a step into the first anchor group whose first member is
            at least that similar (difflib's ratio); this depends on the order of the steps by design.
    """
    cluster: list[int] = []
    sizes: list[int] = []
    exact: dict[tuple[int, str], int] = {}
    representatives: dict[int, list[tuple[str, int]]] = {}
    for group, keys in zip(groups, anchors, strict=True):
        known = representatives.setdefault(group, [])
        for key in keys:
            place = None
            if key is not None:
                place = exact.get((group, key))
                if similarity is not None:
                    place = _similar(key, known, similarity)
            if place is None:
                place = len(sizes)
                sizes.append(0)
                if key is not None:
                    exact[group, key] = place
                    known.append((key, place))
            cluster.append(place)
            sizes[place] += 1
    return AnchorGroups(torch.tensor(cluster, dtype=torch.int64), sizes.count(1))


def gigpo_advantages(
    rewards: Sequence[Sequence[float]],
    groups: Sequence[int],
    anchors: AnchorGroups,
    *,
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
        anchors: Which steps began in the same state.
        normalise_std: Divide by the deviation (mean_std_norm), on both levels.
        step_weight: Omega.
        turn_discount: Discount of step returns; the episode's return has none.
        count_steps: In the episode statistics each step of a trajectory counts once (the authors' code), or each
            trajectory once (their paper).
        singleton_raw: Episode advantage in a group of one is the return itself, or 0.
        epsilon: Added to deviations.
    """
    scale: Scale = "group_std" if normalise_std else "none"
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    episode = group_advantages(
        torch.tensor([sum(turns) for turns in rewards], dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        scale=scale,
        singleton="raw" if singleton_raw else "zero",
        epsilon=epsilon,
        counts=lengths if count_steps else None,
    )
    returns = [value for turns in rewards for value in discounted_turn_returns(turns, turn_discount)]
    step = group_advantages(
        torch.tensor(returns, dtype=torch.float64), anchors.cluster, scale=scale, epsilon=epsilon
    )
    total = iter((episode.repeat_interleave(lengths) + step_weight * step).tolist())
    return [[next(total) for _ in turns] for turns in rewards]


def _similar(key: str, known: Sequence[tuple[str, int]], threshold: float) -> int | None:
    for representative, place in known:
        if key == representative or difflib.SequenceMatcher(None, representative, key).ratio() >= threshold:
            return place
    return None
