"""Micro-batches of rows, and which of their tokens are computed once. Pure: ids in, plans out.

A plan that is not clearly cheaper than the rows as they are is not made. It is estimated with padding, so that a plan
may also do no more than divide rows that share nothing into calls of like length.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollgym.trainer.backends.batching import length_buckets, packed_buckets
from rollgym.trainer.backends.prefix_paths import Ids, Paths, paths_of
from rollgym.trainer.backends.prefix_tree import CallCosts, SharedRows, Tree, rows_apart, tree_of

_CLEARLY = 0.95
"""What sharing may cost at most, as a part of what it costs not to: costs are estimates, of about that precision."""


@dataclass(frozen=True, slots=True)
class Bucket:
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

    def of(self, indices: Sequence[int]) -> "Bucket":
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
        self._kept: OrderedDict[tuple[bytes, int, CallCosts, bool], list[Bucket]] = OrderedDict()

    def plan(
        self, ids: Sequence[Ids], budget: int, costs: CallCosts, *, prefixes: bool = True
    ) -> list[Bucket]:
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


def plan(ids: Sequence[Ids], budget: int, costs: CallCosts, *, prefixes: bool = True) -> list[Bucket]:
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
    flat = [Bucket(bucket) for bucket in cut(lengths, budget)]
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


def _flat_cost(bucket: Bucket, lengths: Sequence[int], costs: CallCosts) -> float:
    return rows_apart([lengths[row] for row in bucket.rows]).tree.cost(costs)


def _buckets(trees: Sequence[tuple[int, Tree]], paths: Paths) -> list[Bucket]:
    """Return the micro-batches of trees; each is given with the number of its first path."""
    firsts = np.array([first for first, _ in trees])
    rows: list[list[int]] = [[] for _ in trees]
    for row, path in enumerate(paths.of_row):
        rows[int(np.searchsorted(firsts, path, side="right")) - 1].append(row)
    return [
        Bucket(
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
