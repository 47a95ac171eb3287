"""Levels made backwards: from solved boards, by pulling, with the fewest moves to solve each one known exactly.

A breadth-first search runs in reverse over boxes and player: walking back, or pulling a box. Each step backwards is
one move forwards, so the layer in which a position is first found is the least number of moves that solve it.
"""

from dataclasses import dataclass

import numpy as np

from envs.sokoban.board import Level, Room
from envs.sokoban.solver import State
from envs.splits import Split, split_of_text

_TRIES = 2_000
_MAX_STATES = 40_000
# All rooms together: about two thirds of a second, so that wishes which contradict each other hold nobody up for long.
_ALL_STATES = 400_000
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
    """What levels are wanted.

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
    """A level and the moves of its shortest solution."""

    level: Level
    optimal_moves: int


def generate(generator: np.random.Generator, difficulty: Difficulty, split: Split | None) -> GeneratedLevel:
    """Draw a level of the wanted difficulty and split.

    Raises:
        ValueError: If none turns up: the wishes contradict each other.
    """
    states = 0
    for _ in range(_TRIES):
        if states > _ALL_STATES:
            break
        room = _draw_room(generator, difficulty)
        if room is None:
            continue
        layers = _pull_layers(room, difficulty.max_moves)
        states += sum(map(len, layers))
        wanted = [
            (state, depth)
            for depth, layer in enumerate(layers)
            if depth >= difficulty.min_moves
            for state in layer
            if not state[0] & room.targets and state[1] not in room.targets
        ]
        # A few draws from one room are cheap; many would make levels of one room alike.
        for _ in range(min(8, len(wanted))):
            (boxes, player), depth = wanted[int(generator.integers(len(wanted)))]
            level = Level(room, boxes, player)
            if split is None or split_of(level) == split:
                return GeneratedLevel(level, depth)
    raise ValueError(
        f"no level of size {difficulty.height}x{difficulty.width} with {difficulty.boxes} boxes and "
        f"{difficulty.min_moves} to {difficulty.max_moves} moves was found: loosen min_moves, max_moves or size, "
        "or take fewer boxes"
    )


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
    for place in range(length):
        if turns[place]:
            way = ways[place]
        row = min(max(row + (-1, 1, 0, 0)[way], 1), height - 2)
        column = min(max(column + (0, 0, -1, 1)[way], 1), width - 2)
        for down, right in _STAMPS[stamps[place]]:
            if 1 <= row + down <= height - 2 and 1 <= column + right <= width - 2:
                floor.add((row + down) * width + column + right)
    if len(floor) <= 2 * difficulty.boxes + 1:
        return None
    cells = sorted(floor)
    targets = generator.choice(len(cells), difficulty.boxes, replace=False).tolist()
    walls = frozenset(range(height * width)) - floor
    return Room(height, width, walls, frozenset(cells[place] for place in targets))


def _pull_layers(room: Room, max_moves: int | None) -> list[list[State]]:
    """Return positions by the least number of moves that solve them, as far as the search gets."""
    layer: list[State] = [(room.targets, cell) for cell in room.floor if cell not in room.targets]
    layers = [layer]
    seen = set(layer)
    while layer and len(seen) < _MAX_STATES and (max_moves is None or len(layers) <= max_moves):
        found: list[State] = []
        for boxes, player in layer:
            for step in room.steps:
                back = player - step
                if back in room.walls or back in boxes:
                    continue
                ahead = player + step
                if (state := (boxes, back)) not in seen:
                    seen.add(state)
                    found.append(state)
                if ahead in boxes and (state := ((boxes - {ahead}) | {player}, back)) not in seen:
                    seen.add(state)
                    found.append(state)
        layers.append(found)
        layer = found
    return layers
