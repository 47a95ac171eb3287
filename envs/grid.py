"""Base of the grid games: text in, text out, one turn after another. Knows profiles, knows no game."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from numpy.typing import NDArray

from clients.protocol.spaces import UnicodeText
from envs.profiles import name_table, profile_named, read_actions, reply_format

GRID_KWARGS: Mapping[str, Any] = {
    "max_episode_steps": {"type": "integer", "minimum": 1},
    "profile": {"enum": ["native", "ragen", "roll", "verl-agent", "gem"]},
    "format_penalty": {"type": ["number", "null"]},
    "max_actions_per_turn": {"type": "integer", "minimum": 1, "maximum": 100},
    "render_mode": {"enum": ["ansi", "rgb_array", None]},
    "split": {"enum": ["train", "valid", "test", None]},
}
"""JSON Schema of the kwargs that all grid games have."""


class Move(NamedTuple):
    """What one action did."""

    reward: float
    terminated: bool
    success: bool


class GridGame(gymnasium.Env[str, str]):
    """A game on a grid that a language model plays.

    Args:
        actions: Names of the actions.
        max_episode_steps: Steps after which an episode is truncated.
        profile: How boards are shown and replies are read.
        format_penalty: Added to the reward of an unreadable reply; the profile's own if None.
        max_actions_per_turn: Actions that one reply may name, separated by `||`.
        render_mode: "ansi" or "rgb_array".

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = {
        "render_modes": ["ansi", "rgb_array"],
        "render_fps": 4,
        "kind": "episodic",
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "metrics": {"steps": "last", "invalid_replies": "last"},
        "version": "0",
    }

    def __init__(
        self,
        actions: tuple[str, ...],
        *,
        max_episode_steps: int,
        profile: str,
        format_penalty: float | None,
        max_actions_per_turn: int,
        render_mode: str | None,
    ) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps must be at least 1, not {max_episode_steps}")
        if max_actions_per_turn < 1:
            raise ValueError(f"max_actions_per_turn must be at least 1, not {max_actions_per_turn}")
        if render_mode not in (None, "ansi", "rgb_array"):
            raise ValueError(f"render_mode must be 'ansi' or 'rgb_array', not {render_mode!r}")
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self.profile = profile_named(profile)
        self._actions = actions
        self._names = name_table(actions)
        self._penalty = self.profile.default_penalty if format_penalty is None else float(format_penalty)
        self._limit = max_episode_steps
        self._per_turn = max_actions_per_turn
        self._reply_format = reply_format(self.profile, ", ".join(actions), actions[0], max_actions_per_turn)
        self._expert = False
        self._steps = 0
        self._invalid_turns = 0
        self._last_action: int | None = None
        # Where profiles show nothing but the board, no formatting is needed on the way.
        self._plain = self.profile.template == "{board}"

    # -- what a game implements ------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, options: Mapping[str, Any]) -> None:
        """Set up an episode from `self.np_random` and the reset's options."""

    @abstractmethod
    def _move(self, action: int) -> Move:
        """Take one action."""

    @abstractmethod
    def _idle(self) -> float:
        """Return the reward of a step on which nothing was done."""

    @abstractmethod
    def _board(self) -> str:
        """Draw the board for the policy."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """Return what `info` says of the state: `state`, `anchor` and the game's own."""

    @abstractmethod
    def _rules(self) -> str:
        """Return the game's instruction, without the reply format."""

    @abstractmethod
    def _best_action(self) -> int:
        """Return the expert's action."""

    @abstractmethod
    def _optimal_steps(self) -> int | None:
        """Return the least number of steps from here; None if it is not known."""

    @abstractmethod
    def _picture(self) -> NDArray[np.uint8]:
        """Return the board as a picture, `[height, width, 3]`."""

    # -- Gymnasium -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode. All games take the option `expert`; each has its own beside it."""
        super().reset(seed=seed)
        options = options or {}
        self._expert = bool(options.get("expert", False))
        self._steps = 0
        self._invalid_turns = 0
        self._last_action = None
        self._begin(options)
        info = self._info(success=False, valid=True, reward=0.0, penalty=0.0)
        info["instruction"] = f"{self._rules()} {self._reply_format}"
        info["optimal_steps"] = self._optimal_steps()
        return self._observation(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the actions that a reply names, or none if it cannot be read."""
        chosen = read_actions(action, self.profile, self._names, self._per_turn)
        if not chosen:
            return self._invalid_turn()
        reward, terminated, success = 0.0, False, False
        for one in chosen:
            self._steps += 1
            self._last_action = one
            gained, terminated, success = self._move(one)
            reward += gained
            if terminated or self._steps >= self._limit:
                break
        truncated = not terminated and self._steps >= self._limit
        info = self._info(success=success, valid=True, reward=reward, penalty=0.0)
        return self._observation(), reward, terminated, truncated, info

    def render(self) -> Any:
        """Return the board as text or as a picture, by `render_mode`."""
        if self.render_mode == "rgb_array":
            return self._picture()
        if self.render_mode == "ansi":
            title = "" if self._last_action is None else f"  ({self._actions[self._last_action]})"
            return f"{title}\n{self._board()}\n"
        return None

    def _invalid_turn(self) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = 0.0
        self._invalid_turns += 1
        self._last_action = None
        # A reply that costs no step must still not be free for ever: turns beyond the limit are cut as well.
        if self.profile.invalid_costs_step:
            self._steps += 1
            reward = self._idle()
        spent = self._steps if self.profile.invalid_costs_step else self._steps + self._invalid_turns
        truncated = spent >= self._limit
        info = self._info(success=False, valid=False, reward=reward, penalty=self._penalty)
        text = f"{self.profile.invalid_note}\n{self._observation()}"
        return text, reward + self._penalty, False, truncated, info

    def _observation(self) -> str:
        board = self._board()
        if self._plain:
            return board
        left = max(0, self._limit - self._steps)
        return self.profile.template.format(board=board, left=left, actions=", ".join(self._actions))

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        info = {
            "success": success,
            "action_is_valid": valid,
            "format_penalty": penalty,
            "env_reward": reward,
            "available_actions": list(self._actions),
            "metrics": {"steps": self._steps, "invalid_replies": self._invalid_turns},
            **self._facts(),
        }
        if self._expert:
            info["expert_action"] = self._expert_reply()
        return info

    def _expert_reply(self) -> str:
        return self._actions[self._best_action()]
