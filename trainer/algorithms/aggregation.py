"""From token losses to one number, with denominators of the whole batch.

Every mode is a sum divided by a count that was taken before any split. So the losses of micro-batches and of
data-parallel shards add up to the loss of the whole batch, and their gradients to its gradient.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self, assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import AggregationMode
from rollgym.trainer.core.device import widest_float


@dataclass(frozen=True, slots=True)
class Denominators:
    """The counts of everything that one optimizer step trains on, over all micro-batches and all shards.

    Attributes:
        tokens: Number of sampled tokens.
        rows: Number of sequences with at least one sampled token. A sequence is a row, or the rows of a trajectory
            that was recorded in several segments.
        positive_tokens: Number of sampled tokens of the episodes that did well, where a loss is of those alone.
    """

    tokens: int
    rows: int
    positive_tokens: int = 0

    @classmethod
    def from_mask(cls, mask: Tensor) -> Self:
        """Count a mask `[rows, tokens]` that holds the whole batch."""
        return cls.from_lengths(mask.sum(dim=1).tolist())

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> Self:
        """Count sequences of which only the number of sampled tokens is known."""
        lengths = list(lengths)
        return cls(tokens=sum(lengths), rows=sum(1 for length in lengths if length))

    def __add__(self, other: "Denominators") -> "Denominators":
        """Return the counts of two disjoint parts taken together."""
        return Denominators(
            self.tokens + other.tokens,
            self.rows + other.rows,
            self.positive_tokens + other.positive_tokens,
        )


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: AggregationMode,
    denominators: Denominators,
    horizon: int | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return this part's share of the aggregated loss; the shares of all parts add up to the whole.

    Args:
        values: Token losses, `[rows, tokens]`. What lies outside the mask is never read, NaN included.
        mask: True where a token counts.
        mode: `token-mean` divides by all tokens; `token-sum` by nothing; `seq-mean-token-sum` sums a sequence and
            divides by the number of sequences that have tokens; `seq-mean-token-sum-norm` divides that by `horizon`
            (Dr. GRPO); `seq-mean-token-mean` takes the mean of a sequence's tokens, then the mean over sequences (GRPO,
            GSPO).
        denominators: Counts of the whole batch.
        horizon: The constant length of `seq-mean-token-sum-norm`.
        lengths: Sampled tokens of the sequence that each row is of, `[rows]`; every row is one of its own if None.

    Raises:
        ValueError: If the mode needs a horizon and there is none.
    """
    values = torch.where(mask, values, 0.0)
    rows = max(denominators.rows, 1)
    match mode:
        case "token-mean":
            return values.sum() / max(denominators.tokens, 1)
        case "token-sum":
            return values.sum()
        case "seq-mean-token-sum":
            return values.sum() / rows
        case "seq-mean-token-sum-norm":
            if horizon is None:
                raise ValueError("seq-mean-token-sum-norm divides by a constant: give 'horizon'")
            return values.sum() / (rows * horizon)
        case "seq-mean-token-mean":
            return (values.sum(dim=1) / _lengths(mask, lengths)).sum() / rows
        case _:
            assert_never(mode)


def share(
    mask: Tensor, mode: AggregationMode, denominators: Denominators, lengths: Tensor | None = None
) -> Tensor:
    """Return which part of the whole batch this mask is, in the unit that `mode` averages over; see `aggregate`."""
    if mode in ("token-mean", "token-sum"):
        return mask.sum() / max(denominators.tokens, 1)
    return (mask.sum(dim=1) / _lengths(mask, lengths)).sum() / max(denominators.rows, 1)


def _lengths(mask: Tensor, lengths: Tensor | None) -> Tensor:
    return (mask.sum(dim=1) if lengths is None else lengths).clamp(min=1)


Metrics = dict[str, tuple[float, float]]


def collect(parts: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
    """Return tensor metrics as plain numbers, with one transfer from the device for all of them."""
    if not parts:
        return {}
    numbers = [number.detach() for pair in parts.values() for number in pair]
    device = numbers[0].device
    flat = torch.stack([number.to(device, widest_float(device)) for number in numbers]).tolist()
    return {name: (flat[2 * index], flat[2 * index + 1]) for index, name in enumerate(parts)}


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Return the metrics of several parts of a batch taken together."""
    merged: Metrics = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + total, before[1] + count)
    return merged


def means(metrics: Metrics) -> dict[str, float]:
    """Return each metric's mean; a metric that nothing counted towards is left out."""
    return {name: total / count for name, (total, count) in metrics.items() if count > 0}
