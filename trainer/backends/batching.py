"""Cut rows into micro-batches by tokens, rows of like length together.

Rows that are not packed are padded at their end. A causal model never looks ahead, so padding cannot change a
row's own outputs, and no row attends to another: there is nothing to mask.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def length_buckets(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return row indices by micro-batch, longest rows first.

    Each micro-batch has at most `budget` tokens, padding included; a row longer than that is alone. Rows of equal
    length keep their order, so the cut depends on nothing but the lengths.

    Args:
        lengths: Tokens of each row.
        budget: Tokens of a micro-batch.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    buckets: list[list[int]] = []
    width = 0
    for index in order:
        if buckets and (len(buckets[-1]) + 1) * width <= budget:
            buckets[-1].append(index)
        else:
            buckets.append([index])
            width = lengths[index]
    return buckets


_PADDED = 8
"""How many times the tokens of packed rows their padded form may have, which only the loss reads."""


def packed_buckets(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return row indices by micro-batch as `length_buckets` does, of rows that are computed without padding.

    Args:
        lengths: Tokens of each row.
        budget: Tokens of a micro-batch; padded to the longest, its rows have at most eight times as many.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    buckets: list[list[int]] = []
    tokens = width = 0
    for index in order:
        length = lengths[index]
        if (
            buckets
            and tokens + length <= budget
            and (len(buckets[-1]) + 1) * width <= max(_PADDED * budget, width)
        ):
            buckets[-1].append(index)
            tokens += length
        else:
            buckets.append([index])
            tokens = width = length
    return buckets


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return `[rows, longest]` in the type that the rows have, zeros behind the end of each; `[0, 0]` of no rows."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True) if rows else torch.zeros(0, 0)
