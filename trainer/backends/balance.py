"""Rows over ranks, so that all of them have equally much to compute. Pure."""

import bisect
import heapq
from collections.abc import Sequence

from rollgym.trainer.backends.prefix_paths import Ids, paths_of


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
