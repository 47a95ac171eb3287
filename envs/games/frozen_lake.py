"""FrozenLake-v0: cross a frozen lake to the goal without falling into a hole.

Maps are drawn at random, measured by their shortest safe path, and split by content.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.grid import GridGame, Move, Observation
from rollgym.envs.core.splits import Split, TaskSplit, checked_split, split_of_text
from rollgym.envs.core.text_game import GameKwargs, StepLimit

Rows = tuple[str, ...]

_MAX_SIDE = 64
# Tries, by the cells that they look at: about thirty milliseconds, since other sessions in the process wait.
_TRIES, _CELLS, _CARVED_CELLS = 2_000, 40_000, 40_000


def split_of(rows: Rows) -> Split:
    """Return the split that a map belongs to, by its content alone: 60 % train, 20 % valid, 20 % test."""
    return split_of_text("\n".join(rows))


def goal_distances(rows: Rows) -> list[int]:
    """Return, for each cell, the length of the shortest safe path to a goal; -1 without one."""
    height, width = len(rows), len(rows[0])
    tiles = "".join(rows)
    distances = [-1] * len(tiles)
    frontier = [cell for cell, tile in enumerate(tiles) if tile == "G"]
    for cell in frontier:
        distances[cell] = 0
    while frontier:
        reached = []
        for cell in frontier:
            row, column = divmod(cell, width)
            for near, inside in (
                (cell - 1, column > 0),
                (cell + width, row < height - 1),
                (cell + 1, column < width - 1),
                (cell - width, row > 0),
            ):
                if inside and distances[near] < 0 and tiles[near] in "SF":
                    distances[near] = distances[cell] + 1
                    reached.append(near)
        frontier = reached
    return distances


def _checked_map(rows: Sequence[str]) -> Rows:
    """Return a map as a tuple of rows.

    Raises:
        ValueError: If it is not a rectangle of S, F, H and G with at least one S and one G, or larger than `_MAX_SIDE`.
    """
    chosen = tuple(rows) if isinstance(rows, (list, tuple)) else ()
    if not chosen or not all(isinstance(row, str) and row and set(row) <= set("SFHG") for row in chosen):
        raise ValueError("map must be a list of rows made of the letters S, F, H and G")
    if len(chosen) > _MAX_SIDE or len(chosen[0]) > _MAX_SIDE:
        raise ValueError(f"map has at most {_MAX_SIDE} rows and columns")
    if len({len(row) for row in chosen}) != 1:
        raise ValueError("all rows of map must have the same length")
    tiles = "".join(chosen)
    if "S" not in tiles or "G" not in tiles:
        raise ValueError("map needs at least one start S and one goal G")
    return chosen


@dataclass(frozen=True, slots=True)
class MapWishes:
    """The wanted kind of maps.

    Attributes:
        size: Side.
        hole_density: Probability that a cell is a hole.
        random_start: Draw start and goal cells, too.
        min_path: Shortest safe path, at least.
        max_path: And at most; None for no bound.
    """

    size: int
    hole_density: float
    random_start: bool
    min_path: int
    max_path: int | None

    def fits(self, rows: Rows, start: int) -> bool:
        """Whether a map can be solved, on a path of the wanted length."""
        length = goal_distances(rows)[start]
        return length >= max(1, self.min_path) and (self.max_path is None or length <= self.max_path)


def _draw_map(generator: np.random.Generator, wishes: MapWishes, split: Split | None) -> Rows | None:
    """Draw maps until one can be solved, has a path of the wanted length and belongs to the split.

    After some tries a straight way is laid over the holes: with many holes, hardly any map can be solved.

    Returns:
        The map; None if none turned up soon.
    """
    size = wishes.size
    tries = min(_TRIES, _CELLS // size**2)
    for attempt in range(tries + _CARVED_CELLS // size**2):
        holes = (generator.random(size * size) < wishes.hole_density).tolist()
        start, goal = 0, size * size - 1
        if wishes.random_start:
            start, goal = generator.choice(size * size, 2, replace=False).tolist()
        tiles = ["H" if hole else "F" for hole in holes]
        if attempt >= tries:
            for cell in _straight_way(generator, start, goal, size):
                tiles[cell] = "F"
        tiles[start], tiles[goal] = "S", "G"
        rows = tuple("".join(tiles[row * size : (row + 1) * size]) for row in range(size))
        if (split is None or split_of(rows) == split) and wishes.fits(rows, start):
            return rows
    return None


@lru_cache(maxsize=256)
def _example_map(wishes: MapWishes, split: Split | None) -> Rows | None:
    """Return a map that fits, always the same one; None if the options contradict each other, or nearly do."""
    return _draw_map(np.random.default_rng(0), wishes, split)


def _straight_way(generator: np.random.Generator, start: int, goal: int, size: int) -> list[int]:
    """Draw one of the shortest ways from start to goal."""
    (row, column), (last_row, last_column) = divmod(start, size), divmod(goal, size)
    down, right = abs(last_row - row), abs(last_column - column)
    steps = generator.permutation([True] * down + [False] * right).tolist()
    way = []
    for goes_down in steps:
        if goes_down:
            row += 1 if last_row > row else -1
        else:
            column += 1 if last_column > column else -1
        way.append(row * size + column)
    return way


ACTIONS = ("Left", "Down", "Right", "Up")
_ICE, _HOLE, _GOAL, _PLAYER = (222, 238, 248), (28, 60, 96), (244, 201, 93), (200, 60, 60)
_COLOURS = {"S": _ICE, "F": _ICE, "H": _HOLE, "G": _GOAL}
# About thirty milliseconds: other sessions in the process wait.
_PLANNING_UPDATES, _PLANNING_SWEEPS = 5_000, 250
_FEW_CELLS = 64
_FADING = 0.99


class FrozenLakeEnv(GridGame):
    """Grid of ice and holes; rules, rewards and transition probabilities are those of Gymnasium's FrozenLake-v1.

    Raises:
        ValueError: If an argument makes no sense.
    """

    RENDERED_CELL = 24

    metadata: dict[str, Any] = GridGame.metadata | {
        "reset_options": ["expert", "map", "split"],
        "description": "Cross a frozen lake to the goal without falling into a hole.",
        "observation": (
            "The map, row by row: `P` you, `_` ice, `O` a hole, `G` the goal; or a picture of it, as `observation` "
            "says, with what the `profile` adds in `info['caption']`."
        ),
        "actions": "`Left`, `Down`, `Right` or `Up`.",
        "reward": "`reward_schedule`: 1 at the goal, 0 in a hole and everywhere else. Success is the goal.",
        "max_episode_steps": 100,
        "baselines": {"random": 0.15, "constant action": 0, "blind": 0.38, "expert": 1},
    }

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=_MAX_SIDE, description="Side of a random map.")] = 4,
        hole_density: Annotated[
            float, Field(ge=0, le=0.95, description="Probability that a cell of a random map is a hole.")
        ] = 0.2,
        map: Annotated[
            Sequence[str] | None,
            Field(description="A fixed map, rows of S, F, H and G; wins over size and difficulty."),
        ] = None,
        is_slippery: Annotated[bool, Field(description="Whether a move may go sideways.")] = False,
        success_rate: Annotated[
            float,
            Field(ge=0, le=1, description="Probability that a slippery move goes where it was meant to."),
        ] = 1 / 3,
        reward_schedule: Annotated[
            Sequence[float],
            Field(
                min_length=3,
                max_length=3,
                description="Rewards for reaching the goal, a hole, and any other cell.",
            ),
        ] = (1, 0, 0),
        random_start: Annotated[bool, Field(description="Draw start and goal cells too.")] = False,
        max_episode_steps: StepLimit = 100,
        min_path: Annotated[
            int, Field(ge=1, description="Shortest safe path of a random map, at least.")
        ] = 1,
        max_path: Annotated[
            int | None, Field(ge=1, description="Shortest safe path of a random map, at most.")
        ] = None,
        split: TaskSplit = None,
        observation: Observation = "text",
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(
            ACTIONS,
            max_episode_steps=max_episode_steps,
            **common,
        )
        if max_path is not None and max_path < min_path:
            raise ValueError(f"max_path {max_path} is below min_path {min_path}")
        self._fixed = None if map is None else _checked_map(map)
        self._wishes = MapWishes(size, hole_density, random_start, min_path, max_path)
        self._split = checked_split(split)
        if self._fixed is None and _example_map(self._wishes, self._split) is None:
            raise ValueError(
                f"no map of size {size} with hole_density {hole_density}, a path of {min_path} to {max_path} steps "
                f"and split {split} was found (a straight way has {2 * (size - 1)} steps): loosen min_path, max_path "
                "or hole_density"
            )
        self._slippery = is_slippery
        self._success_rate = success_rate
        self._rewards = {"G": float(reward_schedule[0]), "H": float(reward_schedule[1])}
        self._frozen_reward = float(reward_schedule[2])
        self._probability = 1.0
        self._position = 0
        self._take_map(self._fixed or ("SF", "FG"))
        if observation == "image":
            rows, columns = (size, size) if self._fixed is None else (len(self._rows), self._width)
            self.observe_pictures(rows, columns)

    def transition_table(self) -> dict[int, dict[int, list[tuple[float, int, float, bool]]]]:
        """Return all transitions in the form of Gymnasium's `P`: state, action, then (p, next, reward, terminated)."""
        table: dict[int, dict[int, list[tuple[float, int, float, bool]]]] = {}
        for cell, tile in enumerate(self._tiles):
            for action in range(4):
                if tile in "GH":
                    entries = [(1.0, cell, 0.0, True)]
                else:
                    ways = self._outcomes(action) if self._slippery else [(action, 1.0)]
                    entries = [self._transition(cell, way, probability) for way, probability in ways]
                table.setdefault(cell, {})[action] = entries
        return table

    # -- the game --------------------------------------------------------------------------------------------------

    def start_episode(self, options: Mapping[str, Any]) -> None:
        given = options.get("map")
        rows = _checked_map(given) if given is not None else self._fixed
        if rows is None:
            split = checked_split(options.get("split", self._split))
            rows = _draw_map(self.np_random, self._wishes, split) or _example_map(self._wishes, split)
            if rows is None:
                raise ValueError(
                    f"no map of split {split} was found: loosen min_path, max_path or hole_density"
                )
        self.require_fitting(len(rows), len(rows[0]))
        self._take_map(rows)
        starts = [cell for cell, tile in enumerate(self._tiles) if tile == "S"]
        self._position = starts[0] if len(starts) == 1 else starts[int(self.np_random.integers(len(starts)))]
        self._probability = 1.0

    def apply_action(self, action: int) -> Move:
        self._probability = 1.0
        if self._slippery:
            action, self._probability = self._slide(action)
        self._position = self._moves[self._position][action]
        tile = self._tiles[self._position]
        return Move(self._rewards.get(tile, self._frozen_reward), tile in "GH", tile == "G")

    def idle_reward(self) -> float:
        self._probability = 1.0
        return 0.0

    def draw_board(self) -> str:
        row, column = divmod(self._position, self._width)
        tile = self._tiles[self._position]
        player = "X" if tile == "H" else "√" if tile == "G" else "P"
        line = self._drawn[row]
        rows = [*self._drawn[:row], f"{line[:column]}{player}{line[column + 1 :]}", *self._drawn[row + 1 :]]
        return "\n".join(rows)

    def state_info(self) -> dict[str, Any]:
        return {
            "prob": self._probability,
            # Within one task the map is the same, so the cell says all of the state.
            "anchor": str(self._position),
            "state": {"position": self._position, "rows": list(self._rows)},
        }

    def describe_rules(self) -> str:
        ice = " The ice is slippery: you may slide sideways." if self._slippery else ""
        seen = (
            "drawn row by row: P is you, _ is safe ice, O is a hole, G is the goal"
            if self._shape is None
            else "seen from above: the red square is you, white is safe ice, dark blue is a hole, yellow is the goal"
        )
        return (
            f"You walk on a frozen lake, {seen}. "
            f"Reach the goal; a hole ends the game. Each action moves you one cell.{ice}"
        )

    def optimal_steps(self) -> int | None:
        """Return the length of the shortest safe path; None on slippery ice."""
        steps = self._distances()[self._position]
        return None if self._slippery or steps < 0 else steps

    def expert_action(self) -> int:
        if self._slippery:
            return self._plan()[self._position]
        distances = self._distances()
        here = distances[self._position]
        ways = enumerate(self._moves[self._position])
        return next((action for action, cell in ways if here > 0 and distances[cell] == here - 1), 0)

    def draw_picture(self, cell: int) -> NDArray[np.uint8]:
        picture = np.zeros((len(self._rows) * cell, self._width * cell, 3), dtype=np.uint8)
        for index, tile in enumerate(self._tiles):
            top, left = (part * cell for part in divmod(index, self._width))
            picture[top : top + cell - 1, left : left + cell - 1] = _COLOURS[tile]
        top, left = (part * cell + cell // 4 for part in divmod(self._position, self._width))
        picture[top : top + cell // 2, left : left + cell // 2] = _PLAYER
        return picture

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _take_map(self, rows: Rows) -> None:
        self._rows = rows
        self._width = width = len(rows[0])
        self._tiles = "".join(rows)
        self._distance_table: list[int] | None = None
        self._policy: list[int] | None = None
        last = len(self._tiles) - width
        self._moves = [
            (
                cell - 1 if cell % width else cell,
                cell + width if cell < last else cell,
                cell + 1 if (cell + 1) % width else cell,
                cell - width if cell >= width else cell,
            )
            for cell in range(len(self._tiles))
        ]
        drawn = self._tiles.translate(str.maketrans("SFH", "__O"))
        self._drawn = [drawn[start : start + width] for start in range(0, len(drawn), width)]

    def _outcomes(self, action: int) -> list[tuple[int, float]]:
        side = (1.0 - self._success_rate) / 2.0
        return [((action - 1) % 4, side), (action, self._success_rate), ((action + 1) % 4, side)]

    def _slide(self, action: int) -> tuple[int, float]:
        """Draw a move's actual direction: the first whose cumulative probability exceeds the draw, as in Gymnasium."""
        draw, total = self.np_random.random(), 0.0
        ways = self._outcomes(action)
        for way, probability in ways:
            total += probability
            if total > draw:
                return way, probability
        return ways[0]

    def _transition(self, cell: int, way: int, probability: float) -> tuple[float, int, float, bool]:
        reached = self._moves[cell][way]
        tile = self._tiles[reached]
        return (probability, reached, self._rewards.get(tile, self._frozen_reward), tile in "GH")

    def _distances(self) -> list[int]:
        if self._distance_table is None:
            self._distance_table = goal_distances(self._rows)
        return self._distance_table

    def _plan(self) -> list[int]:
        """Return the action of each cell that makes reaching the goal most probable (value iteration).

        Large maps are planned by fewer sweeps than it takes to the end, which is nearly as good.
        """
        if self._policy is None:
            safe = [cell for cell, tile in enumerate(self._tiles) if tile in "SF"]
            self._policy = self._plan_by_cell(safe) if len(safe) <= _FEW_CELLS else self._plan_at_once()
        return self._policy

    def _plan_by_cell(self, safe: Sequence[int]) -> list[int]:
        values = [1.0 if tile == "G" else 0.0 for tile in self._tiles]
        policy = [0] * len(values)
        for _ in range(_PLANNING_UPDATES // max(1, len(safe))):
            change = 0.0
            for cell in safe:
                chances = [
                    sum(
                        probability * values[self._moves[cell][way]]
                        for way, probability in self._outcomes(action)
                    )
                    for action in range(4)
                ]
                policy[cell] = chances.index(max(chances))
                change = max(change, abs(chances[policy[cell]] - values[cell]))
                values[cell] = chances[policy[cell]]
            if change < 1e-12:
                break
        return policy

    def _plan_at_once(self) -> list[int]:
        ends = np.array([tile in "GH" for tile in self._tiles])
        # Where the goal is far, a guess by distance saves the sweeps that carry its value there.
        distances = np.array(self._distances(), dtype=np.float64)
        values = np.where(distances < 0, 0.0, _FADING**distances)
        moves = np.array(self._moves)
        chances = np.zeros((4, len(values)))
        for _ in range(_PLANNING_SWEEPS):
            reached = values[moves.T]
            for action in range(4):
                chances[action] = sum(
                    probability * reached[way] for way, probability in self._outcomes(action)
                )
            values = np.where(ends, values, chances.max(axis=0))
        policy: list[int] = chances.argmax(axis=0).tolist()
        return policy
