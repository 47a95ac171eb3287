"""FrozenLake-v0: cross a frozen lake to the goal without falling into a hole."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.grid import GridGame, Move, Observation
from rollgym.envs.core.splits import SPLIT, checked_split
from rollgym.envs.core.text_game import GameKwargs, StepLimit
from rollgym.envs.games.frozen_lake_maps import (
    MAX_SIDE,
    MapWishes,
    Rows,
    checked_map,
    draw_map,
    example_map,
    goal_distances,
)

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
    }

    def __init__(
        self,
        *,
        size: Annotated[int, Field(ge=2, le=MAX_SIDE, description="Side of a random map.")] = 4,
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
        split: Annotated[str | None, SPLIT, Field(description="Only maps of this split, by content.")] = None,
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
        self._fixed = None if map is None else checked_map(map)
        self._wishes = MapWishes(size, hole_density, random_start, min_path, max_path)
        self._split = checked_split(split)
        if self._fixed is None and example_map(self._wishes, self._split) is None:
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
        rows = checked_map(given) if given is not None else self._fixed
        if rows is None:
            split = checked_split(options.get("split", self._split))
            rows = draw_map(self.np_random, self._wishes, split) or example_map(self._wishes, split)
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
