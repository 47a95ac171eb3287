"""Inputs that recorders of several peers draw alike."""

from collections.abc import Iterator
from typing import Any

from peers.algorithms.cases import Draw

CASES = 30


def drawn(function: str, cases: int = CASES) -> Iterator[Draw]:
    """Yield the draws of a function's cases."""
    for number in range(cases):
        yield Draw(function, number)


def episodes(draw: Draw, *, turns: bool = False, alone: bool = True) -> dict[str, Any]:
    """Return a batch of episodes with their rewards and groups."""
    rows = draw.whole(4, 12)
    mask = draw.mask(rows, draw.whole(6, 16))
    groups = draw.groups(rows, alone=alone)
    scores = draw.scores(groups)
    return {"mask": mask, "rewards": draw.rewards(mask, scores, turns=turns), "groups": groups}


def updates(draw: Draw, *, empty: float = 0.1) -> dict[str, Any]:
    """Return what a policy loss reads, rows without tokens with the probability `empty`."""
    mask = draw.mask(draw.whole(2, 8), draw.whole(4, 14), empty=empty)
    old = draw.logprobs(*mask.shape)
    return {"mask": mask, "old": old, "logprobs": draw.near(old), "advantages": draw.advantages(mask)}


def mismatched(draw: Draw) -> dict[str, Any]:
    """Return log-probabilities of the sampling policy and of that at the start of the update."""
    mask = draw.mask(draw.whole(3, 10), draw.whole(4, 14))
    behaviour = draw.logprobs(*mask.shape)
    old = draw.near(behaviour, draw.choice((0.01, 0.1, 0.5)))
    # One episode has hardly moved: some divide by the mean weight, and fail where all are dropped.
    old[0] = draw.near(behaviour[:1], 1e-4)[0]
    return {"mask": mask, "behaviour": behaviour, "old": old}


def clips(draw: Draw) -> dict[str, float]:
    """Return bounds of ratios, as verl and its forks name them."""
    return draw.choice(
        (
            {"clip_ratio": 0.2},
            {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
            {"clip_ratio": 0.3, "clip_ratio_low": 0.1, "clip_ratio_high": 0.5, "clip_ratio_c": 10.0},
        )
    )
