"""Rows over ranks, so that all of them have equally much to compute. Pure."""

import heapq
from collections.abc import Sequence


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
        costs: What each index costs.
        parts: Number of parts; some are empty where there are fewer indices.

    Returns:
        The indices of each part, ascending.
    """
    filled = [(0, part) for part in range(parts)]
    divided: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(costs)), key=lambda index: -costs[index]):
        total, part = heapq.heappop(filled)
        divided[part].append(place)
        heapq.heappush(filled, (total + costs[place], part))
    return [sorted(part) for part in divided]
