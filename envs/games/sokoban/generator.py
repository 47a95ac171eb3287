"""Levels made backwards: from solved boards, by pulling, with the fewest moves to solve each one known exactly.

A breadth-first search runs in reverse over boxes and player: walking back, or pulling a box. Each step backwards is
one move forwards, so the layer in which a position is first found is the least number of moves that solve it.
"""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rollgym.envs.core.splits import Split, split_of_text
from rollgym.envs.games.sokoban.board import Level, Room, push_distances

_MAX_STATES = 40_000
# All rooms together, a room counting for some states by itself: about thirty milliseconds, since other sessions in
# the process wait.
_ALL_STATES, _STATES_OF_A_ROOM = 20_000, 30
_DRAWS, _LAST_DRAWS = 8, 64
EXAMPLES = 32
"""Levels that are kept of a difficulty for seeds that find none: each is searched for once."""
_ATTEMPTS_AT_AN_EXAMPLE = 4
_ROOMS_PULLED_APART, _PULLS_OF_A_BOX = 4, 10
_TURN_PROBABILITY = 0.35
# Floor that each step of the walk stamps, as (row, column) around it.
_STAMPS = (
    ((0, -1), (0, 0), (0, 1)),
    ((-1, 0), (0, 0), (1, 0)),
    ((0, 0), (0, 1), (1, 0)),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    ((0, 0), (0, -1), (1, 0)),
)


@dataclass(frozen=True, slots=True)
class Difficulty:
    """The wanted kind of levels.

    Attributes:
        height: Rows, walls included.
        width: Columns, walls included.
        boxes: Number of boxes.
        min_moves: Fewest moves of an optimal solution.
        max_moves: Most moves of an optimal solution; None for no bound.
    """

    height: int
    width: int
    boxes: int
    min_moves: int
    max_moves: int | None


@dataclass(frozen=True, slots=True)
class GeneratedLevel:
    """A level that was made.

    Attributes:
        level: The level.
        optimal_moves: Moves of its shortest solution; None if unknown.
        solution: Actions that solve it; empty if only their number is known.
    """

    level: Level
    optimal_moves: int | None
    solution: tuple[int, ...] = ()


def generate(
    generator: np.random.Generator, difficulty: Difficulty, split: Split | None
) -> GeneratedLevel | None:
    """Draw a level of the wanted difficulty and split; None if none turned up soon.

    Of many boxes a search backwards does not get far. If it finds nothing, boxes are pulled from their targets at
    random; then a solution is known, and bounds of the fewest moves, but not their number.
    """
    states = 0
    while states < _ALL_STATES:
        states += _STATES_OF_A_ROOM
        room = _draw_room(generator, difficulty)
        if room is None:
            continue
        layers = _PullLayers(room, difficulty.max_moves)
        states += layers.count
        wanted = layers.unsolved(difficulty.min_moves)
        # A few draws from one room are cheap; many would make levels of one room alike.
        draws = _DRAWS if states < _ALL_STATES else _LAST_DRAWS
        for _ in range(min(draws, len(wanted))):
            level, depth = layers.level(*wanted[int(generator.integers(len(wanted)))])
            if split is None or split_of(level) == split:
                return GeneratedLevel(level, depth)
    for _ in range(_ROOMS_PULLED_APART):
        room = _draw_room(generator, difficulty)
        made = None if room is None else _pulled_apart(generator, room, difficulty, split)
        if made is not None:
            return made
    return None


@lru_cache(maxsize=1024)
def example_level(difficulty: Difficulty, split: Split | None, number: int = 0) -> GeneratedLevel | None:
    """Return a fitting level, always the same one of a number; None if the options contradict each other, or nearly do.

    Args:
        difficulty: The wanted kind of levels.
        split: The wanted split.
        number: Index of one of the `EXAMPLES`; several may be equal if few are found.
    """
    if number == 0:
        return generate(np.random.default_rng(0), difficulty, split)
    for attempt in range(_ATTEMPTS_AT_AN_EXAMPLE):
        level = generate(np.random.default_rng([number, attempt]), difficulty, split)
        if level is not None:
            return level
    return example_level(difficulty, split, number // 2)


def split_of(level: Level) -> Split:
    """Return the split that a level belongs to: 60 % train, 20 % valid, 20 % test, by its content alone.

    Mirrored and turned levels belong together, so no test level can be met in training in another guise.
    """
    return split_of_text(canonical_text(level))


def canonical_text(level: Level) -> str:
    """Return the smallest XSB text among the eight mirrored and turned forms of a level."""
    rows = level.to_xsb().split("\n")
    forms = []
    for _ in range(4):
        forms += [rows, [row[::-1] for row in rows]]
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
    return min("\n".join(form) for form in forms)


def _draw_room(generator: np.random.Generator, difficulty: Difficulty) -> Room | None:
    """Carve floor along a random walk and draw targets; None if there is too little floor."""
    height, width = difficulty.height, difficulty.width
    floor: set[int] = set()
    row, column = int(generator.integers(1, height - 1)), int(generator.integers(1, width - 1))
    length = int(1.7 * (height + width))
    turns = (generator.random(length) < _TURN_PROBABILITY).tolist()
    ways = generator.integers(4, size=length + 1).tolist()
    stamps = generator.integers(len(_STAMPS), size=length).tolist()
    way = ways[-1]
    for index in range(length):
        if turns[index]:
            way = ways[index]
        row = min(max(row + (-1, 1, 0, 0)[way], 1), height - 2)
        column = min(max(column + (0, 0, -1, 1)[way], 1), width - 2)
        for down, right in _STAMPS[stamps[index]]:
            if 1 <= row + down <= height - 2 and 1 <= column + right <= width - 2:
                floor.add((row + down) * width + column + right)
    if len(floor) <= 2 * difficulty.boxes + 1:
        return None
    cells = sorted(floor)
    targets = generator.choice(len(cells), difficulty.boxes, replace=False).tolist()
    walls = frozenset(range(height * width)) - floor
    return Room(height, width, walls, frozenset(cells[index] for index in targets))


_PLAYER_BITS = 9


class _PullLayers:
    """Positions of a room by the least number of moves that solve them, as far as the search gets.

    A position is one number: a bit for each cell with a box, over the number of the player's cell. Cells are counted
    among the floor only. Nothing else is as fast to copy and to look up.

    Args:
        room: With boxes on its targets.
        max_moves: Moves that a solution may have; None for no bound.
    """

    def __init__(self, room: Room, max_moves: int | None) -> None:
        self._room = room
        self._cells = room.floor
        index_of = {cell: number for number, cell in enumerate(self._cells)}
        self._targets = sum(1 << index_of[cell] for cell in room.targets)
        # From each cell: the cells to step back to, and the cell on the other side, whose box would come along.
        ways = [
            [
                (
                    index_of[cell - step],
                    1 << index_of[cell - step],
                    1 << index_of[cell + step] if cell + step in index_of else 0,
                )
                for step in room.steps
                if cell - step in index_of
            ]
            for cell in self._cells
        ]
        boxes = self._targets << _PLAYER_BITS
        layer = [boxes | index_of[cell] for cell in self._cells if cell not in room.targets]
        self.layers = [layer]
        seen = set(layer)
        while layer and len(seen) < _MAX_STATES and (max_moves is None or len(self.layers) <= max_moves):
            layer = self._before(layer, seen, ways)
            self.layers.append(layer)
        self.count = sum(map(len, self.layers))

    @staticmethod
    def _before(layer: list[int], seen: set[int], ways: list[list[tuple[int, int, int]]]) -> list[int]:
        found: list[int] = []
        for state in layer:
            player = state & ((1 << _PLAYER_BITS) - 1)
            boxes = state >> _PLAYER_BITS
            for back, back_bit, ahead_bit in ways[player]:
                if boxes & back_bit:
                    continue
                if (walked := state - player + back) not in seen:
                    seen.add(walked)
                    found.append(walked)
                if boxes & ahead_bit:
                    pulled = (boxes ^ ahead_bit | 1 << player) << _PLAYER_BITS | back
                    if pulled not in seen:
                        seen.add(pulled)
                        found.append(pulled)
        return found

    def unsolved(self, min_moves: int) -> list[tuple[int, int]]:
        """Return the positions, with their moves, in which neither a box nor the player stands on a target."""
        targets, apart = self._targets, self._targets << _PLAYER_BITS
        return [
            (state, depth)
            for depth, layer in enumerate(self.layers)
            if depth >= min_moves
            for state in layer
            if not state & apart and not targets >> (state & ((1 << _PLAYER_BITS) - 1)) & 1
        ]

    def level(self, state: int, depth: int) -> tuple[Level, int]:
        """Return a position as a level, with its moves."""
        boxes, player = state >> _PLAYER_BITS, state & ((1 << _PLAYER_BITS) - 1)
        places = frozenset(cell for number, cell in enumerate(self._cells) if boxes >> number & 1)
        return Level(self._room, places, self._cells[player]), depth


def _pulled_apart(
    generator: np.random.Generator, room: Room, difficulty: Difficulty, split: Split | None
) -> GeneratedLevel | None:
    """Pull boxes from their targets at random, until one of the positions on the way is what is wanted."""
    free = [cell for cell in room.floor if cell not in room.targets]
    boxes = set(room.targets)
    trail = [free[int(generator.integers(len(free)))]]
    distances = push_distances(room)
    for which, stays in generator.random((_PULLS_OF_A_BOX * difficulty.boxes, 2)).tolist():
        ways = _ways_from(room, boxes, trail[-1])
        pulls = [
            (box, box + step)
            for box in sorted(boxes)
            for step in room.steps
            if box + step in ways and box + 2 * step in ways
        ]
        # Boxes that are still on a target come first, most of the time.
        late = [pull for pull in pulls if pull[0] in room.targets] if stays < 0.8 else []
        pulls = late or pulls
        if not pulls:
            return None
        box, stand = pulls[int(which * len(pulls))]
        trail += [*_way_to(ways, stand), 2 * stand - box]
        boxes = (boxes - {box}) | {stand}
        level = Level(room, frozenset(boxes), trail[-1])
        if difficulty.max_moves is not None and len(trail) - 1 > difficulty.max_moves:
            return None
        # Each push moves one box by one cell, so a solution has no fewer moves than that.
        least = sum(distances[each] for each in boxes)
        fits = least >= difficulty.min_moves and not boxes & room.targets and trail[-1] not in room.targets
        if fits and (split is None or split_of(level) == split):
            forwards = pairwise(trail[::-1])
            return GeneratedLevel(level, None, tuple(room.steps.index(to - at) for at, to in forwards))
    return None


def _ways_from(room: Room, boxes: set[int], player: int) -> dict[int, int]:
    """Return the cells that the player can walk to, each with the cell before it."""
    came_from = {player: player}
    frontier = deque([player])
    while frontier:
        cell = frontier.popleft()
        for step in room.steps:
            near = cell + step
            if near not in came_from and near not in room.walls and near not in boxes:
                came_from[near] = cell
                frontier.append(near)
    return came_from


def _way_to(ways: dict[int, int], cell: int) -> list[int]:
    """Return the cells that lead to one, without the player's own."""
    way = []
    while ways[cell] != cell:
        way.append(cell)
        cell = ways[cell]
    return way[::-1]
