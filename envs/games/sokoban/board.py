"""A Sokoban level as immutable data, the one rule of the game, and optimal solutions by A*.

Cells are numbered row by row. Levels are written in XSB: `#` wall, `@` player, `+` player on target, `$` box,
`*` box on target, `.` target, space floor (`-` and `_` are read as floor too).
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

ACTIONS = ("Up", "Down", "Left", "Right")
MAX_SIDE = 64
"""Most rows and columns of a level."""

_SYMBOLS = frozenset("#@+$*. -_")


@dataclass(frozen=True)
class Room:
    """The fixed parts of a level.

    Attributes:
        height: Rows.
        width: Columns.
        walls: Cells that nothing enters.
        targets: Cells that boxes belong on.
    """

    height: int
    width: int
    walls: frozenset[int]
    targets: frozenset[int]

    @cached_property
    def steps(self) -> tuple[int, int, int, int]:
        """Return what each action adds to a cell's number: up, down, left, right."""
        return (-self.width, self.width, -1, 1)

    @cached_property
    def floor(self) -> tuple[int, ...]:
        """Return all cells that are not walls."""
        return tuple(cell for cell in range(self.height * self.width) if cell not in self.walls)


@dataclass(frozen=True)
class Level:
    """A room with boxes and the player in it."""

    room: Room
    boxes: frozenset[int]
    player: int

    @property
    def solved(self) -> bool:
        """Whether every box stands on a target."""
        return self.boxes == self.room.targets

    def on_target(self) -> int:
        """How many boxes stand on targets."""
        return len(self.boxes & self.room.targets)

    def moved(self, action: int) -> "Level":
        """Return the level after an action: a push if the box can move, a step if the cell is free, else no change."""
        ahead = self.player + self.room.steps[action]
        if ahead in self.room.walls:
            return self
        if ahead not in self.boxes:
            return Level(self.room, self.boxes, ahead)
        behind = ahead + self.room.steps[action]
        if behind in self.room.walls or behind in self.boxes:
            return self
        return Level(self.room, (self.boxes - {ahead}) | {behind}, ahead)

    def to_xsb(self) -> str:
        """Return the level as XSB text, every row at full width."""
        return "\n".join(
            "".join(self._symbol(row * self.room.width + column) for column in range(self.room.width))
            for row in range(self.room.height)
        )

    def _symbol(self, cell: int) -> str:
        target = cell in self.room.targets
        if cell in self.room.walls:
            return "#"
        if cell == self.player:
            return "+" if target else "@"
        if cell in self.boxes:
            return "*" if target else "$"
        return "." if target else " "


def parse_level(text: str) -> Level:
    """Read a level from XSB text.

    Cells outside the outer wall are made wall, so that nothing can leave the board; a board whose walls do not close
    gets a wall around it.

    Raises:
        ValueError: If the text is not a level: a wrong symbol, not one player, not as many boxes as targets, or it is
            larger than `MAX_SIDE`.
    """
    rows = [row for row in text.strip("\n").splitlines() if row.strip()]
    if not rows:
        raise ValueError("the level is empty")
    strange = set("".join(rows)) - _SYMBOLS
    if strange:
        raise ValueError(f"a level is written with '#@+$*. ' only, not {sorted(strange)}")
    if max(len(rows), *map(len, rows)) > MAX_SIDE:
        raise ValueError(f"a level has at most {MAX_SIDE} rows and columns")
    grid = _walled(rows)
    width = len(grid[0])
    cells = "".join(grid)
    players = [cell for cell, symbol in enumerate(cells) if symbol in "@+"]
    boxes = frozenset(cell for cell, symbol in enumerate(cells) if symbol in "$*")
    targets = frozenset(cell for cell, symbol in enumerate(cells) if symbol in ".+*")
    if len(players) != 1:
        raise ValueError(f"a level has one player, not {len(players)}")
    if not boxes or len(boxes) != len(targets):
        raise ValueError(
            f"a level has as many boxes as targets, and at least one: {len(boxes)} and {len(targets)}"
        )
    walls = frozenset(cell for cell, symbol in enumerate(cells) if symbol == "#")
    return Level(Room(len(grid), width, walls, targets), boxes, players[0])


def is_enclosed(rows: Sequence[str]) -> bool:
    """Return whether walls keep player, boxes and targets from the edge of a board."""
    return is_bordered(rows) or _surroundings(rows) is not None


def is_bordered(rows: Sequence[str]) -> bool:
    """Return whether a board is a rectangle with wall on every edge."""
    width = len(rows[0])
    return rows[0] == rows[-1] == "#" * width and all(
        len(row) == width and row[0] == row[-1] == "#" for row in rows
    )


def _walled(rows: Sequence[str]) -> list[str]:
    """Return rows of one length with wall on every edge, so that each neighbour of a floor cell is on the board."""
    width = max(len(row) for row in rows)
    grid = [row.ljust(width) for row in rows]
    if is_bordered(grid):
        return grid
    outside = _surroundings(grid)
    if outside is None:
        return ["#" * (width + 2), *(f"#{row}#" for row in grid), "#" * (width + 2)]
    return [
        "".join("#" if (line, column) in outside else symbol for column, symbol in enumerate(row))
        for line, row in enumerate(grid)
    ]


def _surroundings(rows: Sequence[str]) -> set[tuple[int, int]] | None:
    """Return the floor that is reached from beyond the edge without crossing a wall; None if that leads inside."""
    height, width = len(rows), max(len(row) for row in rows)
    seen = {(-1, -1)}
    frontier = [(-1, -1)]
    while frontier:
        line, column = frontier.pop()
        for cell in ((line - 1, column), (line + 1, column), (line, column - 1), (line, column + 1)):
            if cell in seen or not (-1 <= cell[0] <= height and -1 <= cell[1] <= width):
                continue
            row = rows[cell[0]] if 0 <= cell[0] < height else ""
            symbol = row[cell[1]] if 0 <= cell[1] < len(row) else " "
            if symbol == "#":
                continue
            if symbol not in " -_":
                return None
            seen.add(cell)
            frontier.append(cell)
    return seen


State = tuple[frozenset[int], int]
"""Boxes and player."""


class SearchLimitError(RuntimeError):
    """The search gave up before it knew."""


def push_distances(room: Room) -> dict[int, int]:
    """Return the fewest pushes that bring a lone box from each cell to a target; dead cells are missing.

    A cell is dead if no box can ever leave it for a target: pulling backwards from the targets never gets there.
    """
    distances = dict.fromkeys(room.targets, 0)
    frontier = deque(room.targets)
    while frontier:
        cell = frontier.popleft()
        for step in room.steps:
            pulled, player = cell + step, cell + 2 * step
            free = pulled not in room.walls and player not in room.walls and _inside(room, player)
            if free and pulled not in distances:
                distances[pulled] = distances[cell] + 1
                frontier.append(pulled)
    return distances


def solve(level: Level, max_states: int = 500_000) -> list[int] | None:
    """Return a shortest sequence of actions that solves `level`, or None if there is none.

    The lower bound is the sum of each box's pushes to its nearest target, which never exceeds the moves that are left.

    Raises:
        SearchLimitError: If `max_states` states were expanded without an answer.
    """
    room = level.room
    distances = push_distances(room)
    if any(box not in distances for box in level.boxes):
        return None
    start: State = (level.boxes, level.player)
    order = count()
    bound = sum(distances[box] for box in level.boxes)
    queue: list[tuple[int, int, int, State]] = [(bound, 0, next(order), start)]
    moves: dict[State, int] = {start: 0}
    came_from: dict[State, tuple[State, int]] = {}
    expanded = 0
    while queue:
        _, negative, _, state = heapq.heappop(queue)
        spent = -negative
        if spent > moves[state]:
            continue
        boxes, player = state
        if boxes == room.targets:
            return _path(came_from, state)
        expanded += 1
        if expanded > max_states:
            raise SearchLimitError(f"no solution within {max_states} states")
        for action, step in enumerate(room.steps):
            ahead = player + step
            if ahead in room.walls:
                continue
            next_boxes = boxes
            if ahead in boxes:
                behind = ahead + step
                if behind not in distances or behind in boxes:
                    continue
                next_boxes = (boxes - {ahead}) | {behind}
            reached: State = (next_boxes, ahead)
            if spent + 1 < moves.get(reached, 1 << 60):
                moves[reached] = spent + 1
                came_from[reached] = (state, action)
                bound = sum(distances[box] for box in next_boxes)
                heapq.heappush(queue, (spent + 1 + bound, -(spent + 1), next(order), reached))
    return None


def _path(came_from: dict[State, tuple[State, int]], state: State) -> list[int]:
    actions = []
    while state in came_from:
        state, action = came_from[state]
        actions.append(action)
    return actions[::-1]


def _inside(room: Room, cell: int) -> bool:
    return 0 <= cell < room.height * room.width
