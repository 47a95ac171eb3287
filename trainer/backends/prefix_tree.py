"""Rows that begin alike as a tree, so that each of its tokens goes through the model once. Pure.

A row that is the beginning of another one needs no computing of its own: a causal model gives its tokens the same
states. The remaining rows are the *paths*. Paths that begin alike share *segments*: the model computes a segment once,
and the segments behind it read its keys and values. A tree of more segments saves tokens and makes more calls; what
those cost is for `CallCosts` to say.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


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
    for index, number in enumerate(order):
        of_row[number] = len(row)
        if index + 1 < len(order):
            following = ids[order[index + 1]]
            ahead = _common(ids[number], following)
            if ahead == len(ids[number]):
                # It is how the next one begins, so that one has as much in common with the path before as this.
                common = min(common, ahead)
                continue
        row.append(number)
        shared.append(common)
        common = ahead if index + 1 < len(order) else 0
    return Paths(row, shared, of_row)


def _common(one: Ids, two: Ids) -> int:
    length = min(len(one), len(two))
    different = one[:length] != two[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


_THRESHOLDS = (8, 32, 128, 512, 2048)
"""Tokens that a segment must save to be computed apart: of the trees that these give, the cheapest is taken."""


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
        packs: Whether rows without a prefix are computed behind each other, without padding.
    """

    pair: float
    masked_pair: float
    copied: float
    call: float
    held: float
    read: float = 0.0
    packs: bool = False

    def of(
        self, rows: NDArray[np.float64], width: NDArray[np.float64], prefix: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the costs of calls of `rows` rows of `width` tokens behind at most `prefix` tokens."""
        pair = np.where(prefix > 0, self.masked_pair, self.pair)
        return rows * (width + pair * width * (prefix + width) + self.copied * prefix) + self.call

    def of_packed(self, lengths: NDArray[np.float64]) -> float:
        """Return the cost of one call of rows of some lengths behind each other, without a prefix."""
        return float((lengths + self.pair * lengths * lengths).sum()) + self.call


class PathSegment(NamedTuple):
    """Tokens that are computed together: those of a path from `start` to `stop`.

    Attributes:
        path: Number of a path that passes through.
        start: Its first position; all before is its prefix.
        stop: The position behind its last token.
        parent: Number of the segment that its prefix ends with; -1 if it has none.
    """

    path: int
    start: int
    stop: int
    parent: int


class ModelCall(NamedTuple):
    """Segments that go through the model together, padded to equal length or, without a prefix, packed.

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

    segments: Sequence[PathSegment]
    calls: Sequence[ModelCall]
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
        packed = [call for call in self.calls if costs.packs and not call.prefix]
        padded = [call for call in self.calls if not (costs.packs and not call.prefix)]
        cost = sum(costs.of_packed(np.array(self.lengths(call), dtype=np.float64)) for call in packed)
        if padded:
            sizes = [(len(call.segments), call.width, call.prefix) for call in padded]
            cost += float(costs.of(*np.array(sizes, dtype=np.float64).T).sum())
        return cost

    def held(self, costs: CallCosts) -> float:
        """Return what is held of it for the gradient, in tokens, padding included."""
        return sum(
            sum(self.lengths(call))
            if costs.packs and not call.prefix
            else len(call.segments) * (call.width + costs.held * call.prefix)
            for call in self.calls
        )

    def lengths(self, call: ModelCall) -> list[int]:
        """Return the tokens of each segment of a call."""
        of_call = (self.segments[number] for number in call.segments)
        return [segment.stop - segment.start for segment in of_call]


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


def tree_of(widths: Sequence[int], shared: Sequence[int], costs: CallCosts, *, prefixes: bool = True) -> Tree:
    """Return the cheapest tree of paths that are computed together.

    Args:
        widths: Tokens of each path.
        shared: Tokens that each has in common with the one before it; what the first is given does not count.
        costs: Of the model's calls.
        prefixes: Whether there may be segments behind others.
    """
    nodes = _radix(widths, shared)
    divisions = [_divided(nodes, len(widths), None)]
    for threshold in _THRESHOLDS if prefixes else ():
        segments, leaves = _divided(nodes, len(widths), threshold)
        if len(segments) == len(widths):
            break  # nothing saves as much, and nothing will save more
        if segments != divisions[-1][0]:
            divisions.append((segments, leaves))
    trees = [Tree(segments, list(_calls(segments, costs)), leaves) for segments, leaves in divisions]
    return min(trees, key=lambda tree: tree.cost(costs))


def rows_apart(lengths: Sequence[int]) -> SharedRows:
    """Return rows that share nothing, and go through the model in one call, as a tree."""
    numbers = list(range(len(lengths)))
    segments = [PathSegment(path, 0, length, -1) for path, length in enumerate(lengths)]
    return SharedRows(Tree(segments, [ModelCall(tuple(numbers), max(lengths), 0)], numbers), numbers, numbers)


def finest_tree(paths: Paths, widths: Sequence[int], costs: CallCosts) -> SharedRows:
    """Return the tree that shares whatever its paths share, of rows none of which is the beginning of another."""
    segments, leaves = _divided(_radix(widths, paths.shared), len(widths), 1)
    return SharedRows(Tree(segments, list(_calls(segments, costs)), leaves), paths.row, paths.of_row)


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
    index_of = {node: number for number, node in enumerate(order)}
    children = [0] * len(order)
    for node in order:
        if parent[node] >= 0:
            children[index_of[parent[node]]] += 1
    return _Nodes(
        [stop[node] for node in order],
        [index_of[parent[node]] if parent[node] >= 0 else -1 for node in order],
        children,
        [path[node] for node in order],
    )


def _divided(nodes: _Nodes, paths: int, threshold: int | None) -> tuple[list[PathSegment], list[int]]:
    """Return segments of which the inner ones save `threshold` tokens each, or are none, and the last of each path."""
    segments: list[PathSegment] = []
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
        segments.append(PathSegment(nodes.path[number], start, stop, before))
    return segments, leaves


def _calls(segments: Sequence[PathSegment], costs: CallCosts) -> Iterator[ModelCall]:
    """Divide segments into calls: level by level, and in each those of like width together."""
    levels: list[list[int]] = []
    level_of: list[int] = []
    for number, segment in enumerate(segments):
        level_of.append(level_of[segment.parent] + 1 if segment.parent >= 0 else 0)
        if level_of[-1] == len(levels):
            levels.append([])
        levels[level_of[-1]].append(number)
    for number, level in enumerate(levels):
        if costs.packs and number == 0:
            # Lengths need not be alike. Longest first, so that those that are equal are neighbours.
            order = sorted(level, key=lambda each: segments[each].start - segments[each].stop)
            yield ModelCall(tuple(order), segments[order[0]].stop, 0)
        else:
            yield from _calls_of_level(segments, level, costs)


def _calls_of_level(
    segments: Sequence[PathSegment], level: Sequence[int], costs: CallCosts
) -> Iterator[ModelCall]:
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
        yield ModelCall(tuple(order[first:last]), int(width[first]), int(prefix[first:last].max()))
