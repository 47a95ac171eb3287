"""FrozenLake-v0: cross a frozen lake to the goal without falling into a hole. Text in, text out."""

import re
from typing import Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from clients.protocol.spaces import UnicodeText
from envs.frozen_lake_maps import Rows, checked_map, draw_map, goal_distances

ACTIONS = ("Left", "Down", "Right", "Up")
_BY_NAME = {name.lower(): index for index, name in enumerate(ACTIONS)}
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_INSTRUCTION = (
    "You walk on a frozen lake, drawn row by row. P is you, _ is safe ice, O is a hole, G is the goal. "
    "Reach the goal; a hole ends the game. Each turn move one cell: Left, Down, Right or Up. {ice}"
    "Reply with <answer>ACTION</answer>, for example <answer>Right</answer>."
)
_COLOURS = {"S": (222, 238, 248), "F": (222, 238, 248), "H": (28, 60, 96), "G": (244, 201, 93)}
_PLAYER = (200, 60, 60)
_CELL = 24


def read_action(reply: str) -> int | None:
    """Return the action that a reply names, or None: the last answer tag outside thinking, or a bare action name."""
    spoken = _THINKING.sub("", reply)
    answers = _ANSWER.findall(spoken)
    return _BY_NAME.get((answers[-1] if answers else spoken).strip().lower())


class FrozenLakeEnv(gymnasium.Env[str, str]):
    """Grid of ice and holes; rules, rewards and transition probabilities are those of Gymnasium's FrozenLake-v1.

    Args:
        size: Side of a random map.
        hole_density: Probability that a cell of a random map is a hole.
        map: A fixed map, rows of S, F, H and G; wins over size and difficulty.
        is_slippery: Whether a move may go sideways.
        success_rate: Probability that a slippery move goes where it was meant to.
        reward_schedule: Rewards for reaching the goal, a hole, and any other cell.
        random_start: Draw start and goal cells too.
        max_episode_steps: Steps after which the episode is truncated.
        min_path: Shortest safe path of a random map, at least.
        max_path: Shortest safe path of a random map, at most.
        split: Only maps of this split, by content.
        format_penalty: Added to the reward of a reply that names no action.
        render_mode: "ansi" or "rgb_array".

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["ansi", "rgb_array"],
        "kind": "episodic",
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "version": "0",
        "max_episode_steps": 100,
        "description": "Cross a frozen lake to the goal without falling into a hole.",
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "size": {"type": "integer", "minimum": 2, "maximum": 64},
            "hole_density": {"type": "number", "minimum": 0, "maximum": 0.95},
            "map": {"type": ["array", "null"], "items": {"type": "string"}},
            "is_slippery": {"type": "boolean"},
            "success_rate": {"type": "number", "minimum": 0, "maximum": 1},
            "reward_schedule": {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3},
            "random_start": {"type": "boolean"},
            "max_episode_steps": {"type": "integer", "minimum": 1},
            "min_path": {"type": "integer", "minimum": 1},
            "max_path": {"type": ["integer", "null"], "minimum": 1},
            "split": {"enum": ["train", "valid", "test", None]},
            "format_penalty": {"type": "number"},
            "render_mode": {"enum": ["ansi", "rgb_array", None]},
        },
    }

    def __init__(
        self,
        *,
        size: int = 4,
        hole_density: float = 0.2,
        map: list[str] | None = None,
        is_slippery: bool = False,
        success_rate: float = 1 / 3,
        reward_schedule: tuple[float, float, float] | list[float] = (1, 0, 0),
        random_start: bool = False,
        max_episode_steps: int = 100,
        min_path: int = 1,
        max_path: int | None = None,
        split: str | None = None,
        format_penalty: float = 0.0,
        render_mode: str | None = None,
    ) -> None:
        if len(reward_schedule) != 3:
            raise ValueError("reward_schedule needs three rewards: goal, hole, frozen")
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self._fixed = None if map is None else checked_map(map)
        self._difficulty: dict[str, Any] = {
            "size": size,
            "hole_density": hole_density,
            "random_start": random_start,
            "min_path": min_path,
            "max_path": max_path,
        }
        self._split = split
        self._slippery = is_slippery
        self._success_rate = success_rate
        self._rewards = {"G": float(reward_schedule[0]), "H": float(reward_schedule[1])}
        self._frozen_reward = float(reward_schedule[2])
        self._limit = max_episode_steps
        self._format_penalty = format_penalty
        self._expert = False
        self._last_action: int | None = None
        self._take_map(self._fixed or ("SF", "FG"))
        self._position = 0
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode. Options: `map`, `split`, `expert`."""
        super().reset(seed=seed)
        options = options or {}
        self._expert = bool(options.get("expert", False))
        given = options.get("map")
        rows = checked_map(given) if given is not None else self._fixed
        if rows is None:
            split = options.get("split", self._split)
            rows = draw_map(self.np_random, split=split, **self._difficulty)
        self._take_map(rows)
        starts = [cell for cell, tile in enumerate(self._tiles) if tile == "S"]
        self._position = starts[0]
        if len(starts) > 1:
            self._position = starts[int(self.np_random.integers(len(starts)))]
        self._steps = 0
        self._last_action = None
        info = self._info(valid=True, success=False, reward=0.0, penalty=0.0, probability=1.0)
        ice = "The ice is slippery: you may slide sideways. " if self._slippery else ""
        info["instruction"] = _INSTRUCTION.format(ice=ice)
        info["optimal_steps"] = self._distances()[self._position]
        return self._draw(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Move one cell, or stay where the reply names no action."""
        self._steps += 1
        chosen = read_action(action)
        self._last_action = chosen
        if chosen is None:
            info = self._info(
                valid=False, success=False, reward=0.0, penalty=self._format_penalty, probability=1.0
            )
            truncated = self._steps >= self._limit
            return f"Invalid action.\n{self._draw()}", self._format_penalty, False, truncated, info
        probability = 1.0
        if self._slippery:
            outcomes = self._outcomes(chosen)
            draw, total = self.np_random.random(), 0.0
            # The first outcome whose cumulative probability exceeds the draw, as Gymnasium picks it.
            for way, probability in outcomes:
                total += probability
                if total > draw:
                    break
            chosen = way
        self._position = self._moves[self._position][chosen]
        tile = self._tiles[self._position]
        reward = self._rewards.get(tile, self._frozen_reward)
        success, terminated = tile == "G", tile in "GH"
        truncated = self._steps >= self._limit and not terminated
        info = self._info(valid=True, success=success, reward=reward, penalty=0.0, probability=probability)
        return self._draw(), reward, terminated, truncated, info

    def render(self) -> Any:
        """Return the board as text or as a picture, by `render_mode`."""
        if self.render_mode == "rgb_array":
            return self._picture()
        if self.render_mode == "ansi":
            title = f"  ({ACTIONS[self._last_action]})\n" if self._last_action is not None else "\n"
            return title + self._draw() + "\n"
        return None

    def transition_table(self) -> dict[int, dict[int, list[tuple[float, int, float, bool]]]]:
        """Return all transitions in the form of Gymnasium's `P`: state, action, then (p, next, reward, terminated)."""
        table: dict[int, dict[int, list[tuple[float, int, float, bool]]]] = {}
        for cell, tile in enumerate(self._tiles):
            table[cell] = {}
            for action in range(4):
                if tile in "GH":
                    table[cell][action] = [(1.0, cell, 0.0, True)]
                    continue
                ways = self._outcomes(action) if self._slippery else [(action, 1.0)]
                entries = []
                for way, probability in ways:
                    reached = self._moves[cell][way]
                    there = self._tiles[reached]
                    reward = self._rewards.get(there, self._frozen_reward)
                    entries.append((probability, reached, reward, there in "GH"))
                table[cell][action] = entries
        return table

    def _take_map(self, rows: Rows) -> None:
        self._rows = rows
        self._width = width = len(rows[0])
        self._tiles = "".join(rows)
        height = len(rows)
        self._distance_table: list[int] | None = None
        self._moves = [
            (
                cell - 1 if cell % width else cell,
                cell + width if cell // width < height - 1 else cell,
                cell + 1 if cell % width < width - 1 else cell,
                cell - width if cell >= width else cell,
            )
            for cell in range(len(self._tiles))
        ]
        drawn = self._tiles.replace("S", "_").replace("F", "_").replace("H", "O")
        self._drawn = [drawn[start : start + width] for start in range(0, len(drawn), width)]

    def _outcomes(self, action: int) -> list[tuple[int, float]]:
        side = (1.0 - self._success_rate) / 2.0
        return [((action - 1) % 4, side), (action, self._success_rate), ((action + 1) % 4, side)]

    def _distances(self) -> list[int]:
        if self._distance_table is None:
            self._distance_table = goal_distances(self._rows)
        return self._distance_table

    def _draw(self) -> str:
        row, column = divmod(self._position, self._width)
        tile = self._tiles[self._position]
        player = "X" if tile == "H" else "√" if tile == "G" else "P"
        line = self._drawn[row]
        rows = [*self._drawn[:row], f"{line[:column]}{player}{line[column + 1 :]}", *self._drawn[row + 1 :]]
        return "\n".join(rows)

    def _info(
        self, *, valid: bool, success: bool, reward: float, penalty: float, probability: float
    ) -> dict[str, Any]:
        info = {
            "success": success,
            "action_is_valid": valid,
            "format_penalty": penalty,
            "env_reward": reward,
            "prob": probability,
            "available_actions": list(ACTIONS),
            "anchor": f"{self._position}",
            "state": {"position": self._position, "rows": list(self._rows)},
            "metrics": {"steps": self._steps},
        }
        if self._expert:
            info["expert_action"] = self._expert_action()
        return info

    def _expert_action(self) -> str:
        distances = self._distances()
        here = distances[self._position]
        for action, reached in enumerate(self._moves[self._position]):
            if here > 0 and distances[reached] == here - 1:
                return ACTIONS[action]
        return ACTIONS[0]

    def _picture(self) -> NDArray[np.uint8]:
        height = len(self._rows)
        picture = np.zeros((height * _CELL, self._width * _CELL, 3), dtype=np.uint8)
        for cell, tile in enumerate(self._tiles):
            row, column = divmod(cell, self._width)
            picture[row * _CELL : (row + 1) * _CELL - 1, column * _CELL : (column + 1) * _CELL - 1] = _COLOURS[tile]
        row, column = divmod(self._position, self._width)
        edge = _CELL // 4
        top, left = row * _CELL, column * _CELL
        picture[top + edge : top + _CELL - edge, left + edge : left + _CELL - edge] = _PLAYER
        return picture
