"""Rows in an order in which those that begin alike are neighbours. Pure.

A row that is the beginning of another one needs no computing of its own: a causal model gives its tokens the same
states. The remaining rows are the *paths*.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
