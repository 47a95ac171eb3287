"""Rows that begin alike as a tree, so that each of its tokens goes through the model once. Pure: ids in, plans out.

A row that is the beginning of another one needs no computing of its own: a causal model gives its tokens the same
states. Of the remaining rows, the *paths*, those that begin alike share *segments*: the model computes a segment once,
and the segments behind it read its keys and values. Whether that pays is for `CallCosts` to say; a plan that is not
clearly cheaper than the rows as they are is not made. It is estimated with padding, so that a plan may also do no more
than divide rows that share nothing into calls of like length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainer.backends.batching import length_buckets

Ids = NDArray[np.int64]

_THRESHOLDS = (8, 32, 128, 512, 2048)
"""Tokens that a segment must save to be computed apart: of the trees that these give, the cheapest is taken."""

_CLEARLY = 0.95
"""What sharing may cost at most, as a part of what it costs not to: costs are estimates, of about that precision."""


@dataclass(frozen=True, slots=True)
class CallCosts:
    """What a call of the model costs, in tokens: one is what computing a token of a long batch takes, attention apart.

    Attributes:
        pair: Each query and key of rows without a prefix (half of them are hidden, and not computed).
        masked_pair: Each query and key of rows behind a prefix, which needs a mask.
        copied: Each token of a row's prefix, whose keys and values are copied for the row.
        call: Each call, whatever its size.
        held: Memory of the keys and values of one token of a row's prefix, as a part of all that is held of a token.
        read: Memory of what a loss reads and makes of one token of a row, as a part of the same.
    """

    pair: float
    masked_pair: float
    copied: float
    call: float
    held: float
    read: float = 0.0

    def of(
        self, rows: NDArray[np.float64], width: NDArray[np.float64], prefix: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the costs of calls of `rows` rows of `width` tokens behind at most `prefix` tokens."""
        pair = np.where(prefix > 0, self.masked_pair, self.pair)
        return rows * (width + pair * width * (prefix + width) + self.copied * prefix) + self.call


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens that are computed together: those of a path from `start` to `stop`.

    Attributes:
        path: Number of a path that passes through.
        start: Where it begins; all before is its prefix.
        stop: Where it ends.
        parent: Number of the segment that its prefix ends with; -1 if it has none.
    """

    path: int
    start: int
    stop: int
    parent: int


@dataclass(frozen=True, slots=True)
class Call:
    """Segments that go through the model together, padded to equal length.

    Attributes:
        segments: Their numbers. Their parents belong to earlier calls.
        width: Tokens of the longest.
        prefix: Tokens of the longest prefix.
    """

    segments: tuple[int, ...]
    width: int
    prefix: int


@dataclass(frozen=True)
class Tree:
    """Paths as segments and calls.

    Attributes:
        segments: Parents before children.
        calls: In order; each segment belongs to one.
        leaves: The last segment of each path.
    """

    segments: Sequence[Segment]
    calls: Sequence[Call]
    leaves: Sequence[int]

    @cached_property
    def parents(self) -> frozenset[int]:
        """The segments that others have as their prefix's end."""
        return frozenset(segment.parent for segment in self.segments) - {-1}

    @property
    def tokens(self) -> int:
        """Tokens that go through the model, padding apart."""
        return sum(segment.stop - segment.start for segment in self.segments)

    def chain(self, path: int) -> list[int]:
        """Return the segments of a path, from its first token on."""
        chain = [self.leaves[path]]
        while (parent := self.segments[chain[-1]].parent) >= 0:
            chain.append(parent)
        return chain[::-1]

    def cost(self, costs: CallCosts) -> float:
        """Return what computing it costs, in tokens."""
        return _cost(self.calls, costs)

    def held(self, costs: CallCosts) -> float:
        """Return what is held of it for the gradient, in tokens, padding included."""
        return sum(len(call.segments) * (call.width + costs.held * call.prefix) for call in self.calls)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """How rows of a micro-batch are computed together.

    Attributes:
        tree: Of paths.
        paths: Indices, in the batch, of rows that the paths are equal to.
        path_of: The path that each row of the micro-batch is a beginning of.
    """

    tree: Tree
    paths: Sequence[int]
    path_of: Sequence[int]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A micro-batch.

    Attributes:
        rows: Indices of its rows in the batch.
        shared: What they share; None if each row goes through the model as it is.
    """

    rows: Sequence[int]
    shared: SharedRows | None = None

    @property
    def calls(self) -> int:
        """Calls of the model that it takes."""
        return 1 if self.shared is None else len(self.shared.tree.calls)

    def of(self, places: Sequence[int]) -> "Bucket":
        """Return the same micro-batch where its rows are some of a larger batch.

        Args:
            places: Where each row is in that batch.
        """
        shared = self.shared
        if shared is not None:
            shared = replace(shared, paths=[places[path] for path in shared.paths])
        return Bucket([places[row] for row in self.rows], shared)

    def saved(self, lengths: Sequence[int]) -> int:
        """Return how many tokens of its rows, of `lengths`, do not go through the model."""
        return 0 if self.shared is None else sum(lengths) - self.shared.tree.tokens


@dataclass(frozen=True, slots=True)
class Paths:
    """Rows in an order in which those that begin alike are neighbours, without the beginnings of others.

    Attributes:
        row: A row that each path is equal to.
        shared: Tokens that each path has in common with the one before it; 0 for the first.
        of_row: The path that each row is a beginning of.
    """

    row: Sequence[int]
    shared: Sequence[int]
    of_row: Sequence[int]


def paths_of(ids: Sequence[Ids]) -> Paths:
    """Return the paths of rows."""
    # Bytes compare like the numbers, and much faster than those one after the other.
    keys = [row.astype(">i8").tobytes() for row in ids]
    order = sorted(range(len(ids)), key=keys.__getitem__)
    row: list[int] = []
    shared: list[int] = []
    of_row = [0] * len(ids)
    common = 0
    for place, number in enumerate(order):
        of_row[number] = len(row)
        if place + 1 < len(order):
            following = ids[order[place + 1]]
            ahead = _common(ids[number], following)
            if ahead == len(ids[number]):
                # It is how the next one begins, so that one has as much in common with the path before as this.
                common = min(common, ahead)
                continue
        row.append(number)
        shared.append(common)
        common = ahead if place + 1 < len(order) else 0
    return Paths(row, shared, of_row)


def _common(one: Ids, two: Ids) -> int:
    length = min(len(one), len(two))
    different = one[:length] != two[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


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
    flat = [Bucket(bucket) for bucket in length_buckets(lengths, budget)]
    if len(ids) < 2:
        return flat
    paths = paths_of(ids)
    widths = [lengths[row] for row in paths.row]
    flat_cost = sum(_flat_cost(bucket.rows, lengths, costs) for bucket in flat)
    if sum(widths) - sum(paths.shared) > _CLEARLY * flat_cost:
        return flat  # not even with calls that cost nothing
    rows = np.bincount(paths.of_row).tolist()
    trees = list(_cut(widths, paths.shared, rows, budget, costs, prefixes=prefixes))
    shared_cost = sum(tree.cost(costs) for _, tree in trees)
    return _buckets(trees, paths) if shared_cost < _CLEARLY * flat_cost else flat


def _flat_cost(rows: Sequence[int], lengths: Sequence[int], costs: CallCosts) -> float:
    width = max(lengths[row] for row in rows)
    return _cost([Call(tuple(rows), width, 0)], costs)


def _cost(calls: Sequence[Call], costs: CallCosts) -> float:
    sizes = np.array([(len(call.segments), call.width, call.prefix) for call in calls], dtype=np.float64)
    return float(costs.of(*sizes.T).sum())


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
        stop = max(start + 1, int(np.searchsorted(growth, before + budget, side="right")))
        tree = tree_of(widths[start:stop], shared[start:stop], costs, prefixes=prefixes)
        while stop > start + 1:
            # The loss reads rows as they are, padded to the longest.
            read = costs.read * sum(rows[start:stop]) * max(widths[start:stop])
            if (held := tree.held(costs) + read) <= budget:
                break
            stop = start + max(1, min(stop - start - 1, int((stop - start) * budget / held)))
            tree = tree_of(widths[start:stop], shared[start:stop], costs, prefixes=prefixes)
        if stop < len(widths):
            better = _where_little_is_cut(shared, start, stop)
            if better < stop:
                stop = better
                tree = tree_of(widths[start:stop], shared[start:stop], costs, prefixes=prefixes)
        yield start, tree
        start = stop


def _where_little_is_cut(shared: Sequence[int], start: int, stop: int) -> int:
    """Return an end in the further half of `start` to `stop` at which the next path shares least with those before."""
    ends = range(stop, (start + stop) // 2, -1)
    return min(ends, key=lambda end: shared[end])


def tree_of(widths: Sequence[int], shared: Sequence[int], costs: CallCosts, *, prefixes: bool = True) -> Tree:
    """Return the cheapest tree of paths that are computed together.

    Args:
        widths: Tokens of each path.
        shared: Tokens that each has in common with the one before it; what the first is given does not count.
        costs: Of the model's calls.
        prefixes: Whether there may be segments behind others.
    """
    nodes = _radix(widths, shared)
    trees = [_tree(nodes, len(widths), None, costs)]
    for threshold in _THRESHOLDS if prefixes else ():
        trees.append(_tree(nodes, len(widths), threshold, costs))
        if len(trees[-1].segments) == len(widths):
            break  # nothing saves as much, and nothing will save more
    return min(trees, key=lambda tree: tree.cost(costs))


def rows_apart(lengths: Sequence[int]) -> SharedRows:
    """Return rows that share nothing, and go through the model in one call, as a tree."""
    numbers = list(range(len(lengths)))
    segments = [Segment(path, 0, length, -1) for path, length in enumerate(lengths)]
    return SharedRows(Tree(segments, [Call(tuple(numbers), max(lengths), 0)], numbers), numbers, numbers)


def finest_tree(paths: Paths, widths: Sequence[int], costs: CallCosts) -> SharedRows:
    """Return the tree that shares whatever its paths share, of rows none of which is the beginning of another."""
    tree = _tree(_radix(widths, paths.shared), len(widths), 1, costs)
    return SharedRows(tree, paths.row, paths.of_row)


@dataclass(frozen=True, slots=True)
class _Nodes:
    """A radix tree: nodes by number, parents before children, and each path's leaf.

    Attributes:
        stop: Tokens from the beginning of the row to the end of each node.
        parent: The node above each; -1 at the top.
        children: How many each has; none for a leaf.
        path: A path that passes through each.
    """

    stop: list[int]
    parent: list[int]
    children: list[int]
    path: list[int]


def _radix(widths: Sequence[int], shared: Sequence[int]) -> _Nodes:
    """Return the radix tree of paths in order."""
    stop: list[int] = []
    parent: list[int] = []
    path: list[int] = []
    open_nodes: list[int] = []  # from the top to the path before
    for number, width in enumerate(widths):
        common = shared[number] if number else 0
        last = -1
        while open_nodes and stop[open_nodes[-1]] > common:
            last = open_nodes.pop()
        if common and (not open_nodes or stop[open_nodes[-1]] < common):
            # The path before is left in the middle of a node: that is divided.
            stop.append(common)
            parent.append(parent[last])
            path.append(number)
            parent[last] = len(stop) - 1
            open_nodes.append(len(stop) - 1)
        parent.append(open_nodes[-1] if open_nodes else -1)
        stop.append(width)
        path.append(number)
        open_nodes.append(len(stop) - 1)
    # A node lies above those that end later.
    order = sorted(range(len(stop)), key=stop.__getitem__)
    place = {node: number for number, node in enumerate(order)}
    children = [0] * len(order)
    for node in order:
        if parent[node] >= 0:
            children[place[parent[node]]] += 1
    return _Nodes(
        [stop[node] for node in order],
        [place[parent[node]] if parent[node] >= 0 else -1 for node in order],
        children,
        [path[node] for node in order],
    )


def _tree(nodes: _Nodes, paths: int, threshold: int | None, costs: CallCosts) -> Tree:
    """Return the tree whose inner segments save `threshold` tokens each, or that has none."""
    segments: list[Segment] = []
    leaves = [0] * paths
    above = [-1] * len(nodes.stop)  # the segment that ends last at or above each node
    for number, stop in enumerate(nodes.stop):
        parent = nodes.parent[number]
        before = above[parent] if parent >= 0 else -1
        start = segments[before].stop if before >= 0 else 0
        count = nodes.children[number]
        if not count:
            leaves[nodes.path[number]] = len(segments)
        elif threshold is None or (count - 1) * (stop - start) < threshold:
            above[number] = before
            continue
        above[number] = len(segments)
        segments.append(Segment(nodes.path[number], start, stop, before))
    return Tree(segments, list(_calls(segments, costs)), leaves)


def _calls(segments: Sequence[Segment], costs: CallCosts) -> Iterator[Call]:
    """Divide segments into calls: level by level, and in each those of like width together."""
    levels: list[list[int]] = []
    level_of: list[int] = []
    for number, segment in enumerate(segments):
        level_of.append(level_of[segment.parent] + 1 if segment.parent >= 0 else 0)
        if level_of[-1] == len(levels):
            levels.append([])
        levels[level_of[-1]].append(number)
    for level in levels:
        yield from _calls_of_level(segments, level, costs)


def _calls_of_level(segments: Sequence[Segment], level: Sequence[int], costs: CallCosts) -> Iterator[Call]:
    """Yield the calls that cost least among those that take the segments of a level in order of their width."""
    order = sorted(level, key=lambda number: segments[number].start - segments[number].stop)
    width = np.array([segments[number].stop - segments[number].start for number in order])
    prefix = np.array([segments[number].start for number in order])
    # Segments of equal width stay together: [first of each width, end].
    bounds = np.append(np.flatnonzero(np.diff(width, prepend=-1)), len(order))
    longest = np.maximum.reduceat(prefix, bounds[:-1])
    best, taken = [0.0], [0]
    for end in range(1, len(bounds)):
        prefixes = np.maximum.accumulate(longest[:end][::-1])[::-1]
        of_last = costs.of((bounds[end] - bounds[:end]).astype(float), width[bounds[:end]], prefixes)
        total = np.array(best) + of_last
        taken.append(int(total.argmin()))
        best.append(float(total[taken[-1]]))
    ends = [len(bounds) - 1]
    while ends[-1]:
        ends.append(taken[ends[-1]])
    for start, stop in zip(ends[:0:-1], ends[-2::-1], strict=True):
        first, last = bounds[start], bounds[stop]
        yield Call(tuple(order[first:last]), int(width[first]), int(prefix[first:last].max()))
