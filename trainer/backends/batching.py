"""Rows divided over ranks and cut into micro-batches, and which of their tokens are computed once. Pure.

Rows that are not packed are padded at their end. A causal model never looks ahead, so padding cannot change a
row's own outputs, and no row attends to another: there is nothing to mask.

A plan that is not clearly cheaper than the rows as they are is not made. It is estimated with padding, so that a plan
may also do no more than divide rows that share nothing into calls of like length.
"""

import bisect
import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rollgym.trainer.backends.prefix_tree import (
    CallCosts,
    Ids,
    Paths,
    SharedRows,
    Tree,
    paths_of,
    rows_apart,
    tree_of,
)


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


_CLEARLY = 0.95
"""What sharing may cost at most, as a part of what it costs not to: costs are estimates, of about that precision."""


@dataclass(frozen=True, slots=True)
class RowBucket:
    """A micro-batch.

    Attributes:
        rows: Indices of its rows in the batch.
        shared: What they share; None if each row goes through the model as it is.
        packs: Whether rows may be packed; those that bring more than tokens are padded.
    """

    rows: Sequence[int]
    shared: SharedRows | None = None
    packs: bool = True

    @property
    def calls(self) -> int:
        """Calls of the model that it takes."""
        return 1 if self.shared is None else len(self.shared.tree.calls)

    def of(self, indices: Sequence[int]) -> "RowBucket":
        """Return the same micro-batch where its rows are some of a larger batch.

        Args:
            indices: Where each row is in that batch.
        """
        shared = self.shared
        if shared is not None:
            shared = replace(shared, paths=[indices[path] for path in shared.paths])
        return replace(self, rows=[indices[row] for row in self.rows], shared=shared)

    def saved(self, lengths: Sequence[int]) -> int:
        """Return how many tokens of its rows, of `lengths`, do not go through the model."""
        return 0 if self.shared is None else sum(lengths) - self.shared.tree.tokens


class Plans:
    """Plans of the latest batches of rows, each made once, whichever models compute it and how often.

    An update has the same rows computed for old log-probabilities and by a reference and a critic, and those of an
    optimizer step as well where something of them is known beforehand, or in its other epochs.

    Args:
        most: How many are kept.
    """

    def __init__(self, most: int = 16) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[bytes, int, CallCosts, bool], list[RowBucket]] = OrderedDict()

    def plan(
        self, ids: Sequence[Ids], budget: int, costs: CallCosts, *, prefixes: bool = True
    ) -> list[RowBucket]:
        """Return what the function of this name returns."""
        # By their contents: rows that come to a rank are others each time.
        key = (_digest(ids), budget, costs, prefixes)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = plan(ids, budget, costs, prefixes=prefixes)
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return found


def _digest(ids: Sequence[Ids]) -> bytes:
    digest = hashlib.blake2b(np.array([len(row) for row in ids], dtype=np.int64).tobytes(), digest_size=16)
    for row in ids:
        digest.update(np.ascontiguousarray(row).data)
    return digest.digest()


def plan(ids: Sequence[Ids], budget: int, costs: CallCosts, *, prefixes: bool = True) -> list[RowBucket]:
    """Cut rows into micro-batches, and say which tokens of each are computed once.

    Args:
        ids: Token ids of the rows.
        budget: Tokens of a micro-batch, padding included, and what else is held for as many tokens as it takes the
            memory of; what one path needs is computed together, whatever the budget.
        costs: Of the model's calls.
        prefixes: Whether the model can compute segments behind a prefix. If not, rows that are beginnings of others
            are all that is shared.

    Returns:
        Micro-batches that hold every row once.
    """
    lengths = [len(row) for row in ids]
    cut = packed_buckets if costs.packs else length_buckets
    flat = [RowBucket(bucket) for bucket in cut(lengths, budget)]
    if len(ids) < 2:
        return flat
    paths = paths_of(ids)
    widths = [lengths[row] for row in paths.row]
    flat_cost = sum(_flat_cost(bucket, lengths, costs) for bucket in flat)
    if sum(widths) - sum(paths.shared) > _CLEARLY * flat_cost:
        return flat  # not even with calls that cost nothing
    rows = np.bincount(paths.of_row).tolist()
    trees = list(_cut(widths, paths.shared, rows, budget, costs, prefixes=prefixes))
    shared_cost = sum(tree.cost(costs) for _, tree in trees)
    return _buckets(trees, paths) if shared_cost < _CLEARLY * flat_cost else flat


def _flat_cost(bucket: RowBucket, lengths: Sequence[int], costs: CallCosts) -> float:
    return rows_apart([lengths[row] for row in bucket.rows]).tree.cost(costs)


def _buckets(trees: Sequence[tuple[int, Tree]], paths: Paths) -> list[RowBucket]:
    """Return the micro-batches of trees; each is given with the number of its first path."""
    firsts = np.array([first for first, _ in trees])
    rows: list[list[int]] = [[] for _ in trees]
    for row, path in enumerate(paths.of_row):
        rows[int(np.searchsorted(firsts, path, side="right")) - 1].append(row)
    return [
        RowBucket(
            of_tree,
            SharedRows(
                tree,
                paths.row[first : first + len(tree.leaves)],
                [paths.of_row[row] - first for row in of_tree],
            ),
        )
        for of_tree, (first, tree) in zip(rows, trees, strict=True)
    ]


def _cut(
    widths: Sequence[int],
    shared: Sequence[int],
    rows: Sequence[int],
    budget: int,
    costs: CallCosts,
    *,
    prefixes: bool,
) -> Iterator[tuple[int, Tree]]:
    """Cut paths into neighbours that fit the budget together; yield the number of the first, and their tree."""
    growth = np.cumsum(np.array(widths) - np.array(shared))
    start = 0
    while start < len(widths):
        before = growth[start] - widths[start]
        most = max(start + 1, int(np.searchsorted(growth, before + budget, side="right")))
        while True:
            # A tree is the dearest part of a plan: only those are made that would be taken if they fit.
            stop = most if most >= len(widths) else _where_little_is_cut(shared, start, most)
            tree = tree_of(widths[start:stop], shared[start:stop], costs, prefixes=prefixes)
            # The loss reads rows as they are, padded to the longest.
            read = costs.read * sum(rows[start:stop]) * max(widths[start:stop])
            held = tree.held(costs) + read
            if stop == start + 1 or held <= budget:
                break
            most = start + max(1, min(stop - start - 1, int((stop - start) * budget / held)))
        yield start, tree
        start = stop


def _where_little_is_cut(shared: Sequence[int], start: int, stop: int) -> int:
    """Return an end in the further half of `start` to `stop` at which the next path shares least with those before."""
    ends = range(stop, (start + stop) // 2, -1)
    return min(ends, key=lambda end: shared[end])


def row_cost(tokens: int, width: int) -> int:
    """Return what a row costs to compute, in a unit of its own.

    A layer of width `h` multiplies each token by about `12 h^2` weights, which is `24 h^2` operations, and compares it
    with half of the row's `n` tokens at `4 h` operations each: `24 h^2 n + 2 h n^2`, which is `n (12 h + n)` but for a
    factor.

    Args:
        tokens: Tokens of the row.
        width: Width of the model.
    """
    return tokens * (12 * width + tokens)


def balanced(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Divide indices into parts of about equal cost: the dearest first, each to the part that has least so far.

    No part costs more than 4/3 of what the best division's dearest part does (Graham 1969). Equal costs keep their
    order, so the division depends on nothing but the costs.

    Args:
        costs: Cost of each index.
        parts: Number of parts; some are empty if there are fewer indices.

    Returns:
        The indices of each part, ascending.
    """
    filled = [(0, part) for part in range(parts)]
    divided: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda each: -costs[each]):
        total, part = heapq.heappop(filled)
        divided[part].append(index)
        heapq.heappush(filled, (total + costs[index], part))
    return [sorted(part) for part in divided]


def balanced_trees(ids: Sequence[Ids], width: int, parts: int) -> list[list[int]]:
    """Divide rows into parts of about equal cost, where each part computes what its rows begin with once.

    Rows that begin alike are neighbours in the order of their ids, which is cut so that the dearest part is as cheap as
    can be. Where rows have little in common they are divided one by one, which gives more equal parts.

    Args:
        ids: Token ids of the rows.
        width: Width of the model.
        parts: Number of parts; some are empty if there are fewer rows.

    Returns:
        The indices of each part, ascending.
    """
    costs = [row_cost(len(row), width) for row in ids]
    apart = balanced(costs, parts)
    paths = paths_of(ids)
    whole = [costs[row] for row in paths.row]
    behind = [cost - row_cost(shared, width) for cost, shared in zip(whole, paths.shared, strict=True)]
    low, high = max(whole, default=0), sum(whole)
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if len(_cuts(whole, behind, limit)) <= parts else (limit + 1, high)
    if low >= max(sum(costs[row] for row in part) for part in apart):
        return apart
    divided: list[list[int]] = [[] for _ in range(parts)]
    first_of = _cuts(whole, behind, low)
    for row, path in enumerate(paths.of_row):
        divided[bisect.bisect_right(first_of, path) - 1].append(row)
    return divided


def _cuts(whole: Sequence[int], behind: Sequence[int], limit: int) -> list[int]:
    """Return where parts begin that cost no more than `limit` each and are as few as can be.

    Args:
        whole: What each path costs alone.
        behind: What it costs behind the one before it.
        limit: No less than the dearest path costs alone.
    """
    cuts: list[int] = []
    spent = 0
    for index, (alone, more) in enumerate(zip(whole, behind, strict=True)):
        if not cuts or spent + more > limit:
            cuts.append(index)
            spent = alone
        else:
            spent += more
    return cuts
