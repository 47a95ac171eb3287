"""Infers a minefield: the exact chance of a mine under each covered cell."""

from collections.abc import Iterator, Mapping, Sequence, Set
from fractions import Fraction
from math import comb, prod

Clue = tuple[frozenset[int], int]
"""Covered cells, and how many mines lie under them."""

_Group = tuple[int, ...]
"""Covered cells that stand beside the same clues, so that they are alike."""
_Counts = dict[int, tuple[int, list[int]]]
"""By number of mines: in how many ways they can lie, and, for each group, how many mines those put there in all."""


class Effort:
    """How much is looked at before a search is given up.

    Args:
        most: Ways to put mines that are tried.
    """

    def __init__(self, most: int) -> None:
        self.left = most

    def spend(self, count: int = 1) -> None:
        """Count some.

        Raises:
            TooHardError: There were as many as there may be.
        """
        self.left -= count
        if self.left < 0:
            raise TooHardError


class TooHardError(Exception):
    """The search for mines exceeded its limit."""


def guessed_chances(covered: Set[int], clues: Sequence[Clue], mines: int) -> dict[int, Fraction]:
    """Return what each clue alone says of the cells beside it, if all of them together are too many to count."""
    chances = dict.fromkeys(covered, Fraction(mines, len(covered)))
    for cells, near in clues:
        for cell in cells:
            chances[cell] = max(Fraction(near, len(cells)), chances[cell] if near else Fraction(0))
    for cells, near in clues:
        if not near:
            chances.update(dict.fromkeys(cells, Fraction(0)))
    return chances


def mine_chances(
    covered: Set[int], clues: Sequence[Clue], mines: int, effort: Effort | None = None
) -> dict[int, Fraction]:
    """Return the chance of a mine under each covered cell, all fields that fit the clues being equally likely.

    Args:
        covered: Covered cells.
        clues: The clues of the open cells on them.
        mines: Mines under all covered cells together.
        effort: Limit of the search; None for no limit.

    Raises:
        TooHardError: It takes more than that.
    """
    if effort is not None:
        effort.spend(len(covered))  # what follows takes as long as some ways for each of them
    components = [(groups, _counts(groups, near, effort)) for groups, near in _components(clues)]
    rest = tuple(sorted(covered - {cell for groups, _ in components for group in groups for cell in group}))
    components.append(
        ((rest,), {k: (comb(len(rest), k), [k * comb(len(rest), k)]) for k in range(len(rest) + 1)})
    )
    chances: dict[int, Fraction] = {}
    for index, (groups, counts) in enumerate(components):
        others: dict[int, int] = {0: 1}
        for position, (_, other) in enumerate(components):
            if position != index:
                others = _joined(others, {number: ways for number, (ways, _) in other.items()})
        total = sum(ways * others.get(mines - number, 0) for number, (ways, _) in counts.items())
        for position, group in enumerate(groups):
            under = sum(
                per_group[position] * others.get(mines - number, 0)
                for number, (_, per_group) in counts.items()
            )
            chances.update((cell, Fraction(under, total * len(group))) for cell in group)
    return chances


def _joined(one: Mapping[int, int], other: Mapping[int, int]) -> dict[int, int]:
    joined: dict[int, int] = {}
    for number, ways in one.items():
        for more, further in other.items():
            joined[number + more] = joined.get(number + more, 0) + ways * further
    return joined


def _components(clues: Sequence[Clue]) -> Iterator[tuple[tuple[_Group, ...], list[Clue]]]:
    """Divide clues into sets that have no cell in common; yield each with its groups of cells."""
    left = [clue for clue in clues if clue[0]]
    while left:
        near = [left.pop()]
        cells = set(near[0][0])
        while touching := [clue for clue in left if clue[0] & cells]:
            near += touching
            left = [clue for clue in left if clue not in touching]
            cells.update(*(clue[0] for clue in touching))
        alike: dict[tuple[bool, ...], list[int]] = {}
        for cell in sorted(cells):
            alike.setdefault(tuple(cell in clue[0] for clue in near), []).append(cell)
        yield tuple(map(tuple, alike.values())), near


def _counts(groups: tuple[_Group, ...], clues: Sequence[Clue], effort: Effort | None) -> _Counts:
    """Count the ways to put mines into the groups of one component."""
    within = [[index for index, group in enumerate(groups) if group[0] in cells] for cells, _ in clues]
    beside = [
        [number for number, members in enumerate(within) if index in members] for index in range(len(groups))
    ]
    # Groups that share clues follow each other, so that a clue is complete, or broken, soon.
    order = sorted(range(len(groups)), key=lambda index: min(beside[index]))
    wanted = [mines for _, mines in clues]
    room = [sum(len(groups[index]) for index in members) for members in within]
    placed = [0] * len(groups)
    counts: _Counts = {}

    def put(step: int) -> None:
        if effort is not None:
            effort.spend()
        if step == len(order):
            ways = prod(comb(len(group), number) for group, number in zip(groups, placed, strict=True))
            before, per_group = counts.get(sum(placed), (0, [0] * len(groups)))
            added = [known + ways * number for known, number in zip(per_group, placed, strict=True)]
            counts[sum(placed)] = (before + ways, added)
            return
        index = order[step]
        size = len(groups[index])
        for number in range(size + 1):
            for clue in beside[index]:
                wanted[clue] -= number
                room[clue] -= size
            if all(0 <= wanted[clue] <= room[clue] for clue in beside[index]):
                placed[index] = number
                put(step + 1)
                placed[index] = 0
            for clue in beside[index]:
                wanted[clue] += number
                room[clue] += size

    put(0)
    return counts
