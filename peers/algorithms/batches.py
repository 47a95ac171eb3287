"""A batch of rows as the losses of all trainers read it, and the command line of recorders."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from peers.algorithms.cases import Draw, Recorder


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several turns, whose policies are apart by little or by much.

    Attributes:
        mask: True where the policy sampled the token, `[rows, tokens]`.
        logprobs: Under the policy in training.
        old: At the start of the update.
        behaviour: When the tokens were sampled.
        reference: Under the reference policy.
        advantages: An advantage per row, repeated over its tokens.
        token_advantages: One per token.
        entropy: Of the policy at each token.
        scores: Return of each row, `[rows]`; in some groups all are the same.
        groups: Group of each row; the members of one stand together.
    """

    mask: Tensor
    logprobs: Tensor
    old: Tensor
    behaviour: Tensor
    reference: Tensor
    advantages: Tensor
    token_advantages: Tensor
    entropy: Tensor
    scores: Tensor
    groups: list[int]

    @classmethod
    def drawn(
        cls, draw: Draw, *, groups: int = 2, size: int = 3, width: int = 12, empty: float = 0.1
    ) -> Self:
        """Draw a batch of so many groups of so many rows; a row has no token with the probability `empty`."""
        of_rows = [group for group in range(groups) for _ in range(size)]
        rows = len(of_rows)
        mask = draw.mask(rows, width, empty=empty, holes=draw.chance(0.8))
        logprobs = draw.logprobs(rows, width)
        old = draw.near(logprobs)
        return cls(
            mask=mask,
            logprobs=logprobs,
            old=old,
            behaviour=draw.near(old),
            reference=draw.near(logprobs),
            advantages=draw.normal(rows, 1).expand(rows, width).clone(),
            token_advantages=draw.advantages(mask),
            # Some find quantiles in float32: none is to fall between two numbers that are one there.
            entropy=draw.normal(rows, width).abs().float().to(draw.dtype),
            scores=draw.scores(of_rows),
            groups=of_rows,
        )

    def of(self, *names: str) -> dict[str, Any]:
        """Return what is so called, and the mask, as inputs of a case."""
        return {**{name: getattr(self, name) for name in names}, "mask": self.mask}


def drawn_double(function: str, number: int, **shape: Any) -> tuple[Draw, Batch]:
    """Return a draw in float64 and a batch of it."""
    draw = Draw(function, number)
    return draw, Batch.drawn(draw, **shape)


def drawn_single(function: str, number: int, **shape: Any) -> tuple[Draw, Batch]:
    """Return a draw in float32, for functions that compute in it, and a batch of it."""
    draw = Draw(function, number, torch.float32)
    return draw, Batch.drawn(draw, **shape)


def recorder_of(
    peer: str, doc: str, parts: Iterable[Callable[[Recorder], None]], distribution: str | None = None
) -> None:
    """Record all parts of a peer into the folder that the command line names.

    Args:
        peer: Its name, and its distribution's unless that is given.
        doc: What the command is.
        parts: Each records some functions.
        distribution: Whose version is recorded.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    to = Recorder(peer, version(distribution or peer), parser.parse_args().out)
    for record in parts:
        record(to)
    to.close()
