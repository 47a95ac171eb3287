"""Environments that the clients' tests serve."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rollgym.clients.protocol.spaces import UnicodeText


class Walk(gymnasium.Env):
    """Text in, text out. Every observation depends on the seed and on all actions; episodes end by chance."""

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["ansi"],
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "description": "A random walk.",
        "version": "3",
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "risk": {"type": "number", "default": 0.1, "description": "Chance that a step ends the walk."}
        },
        "additionalProperties": False,
    }

    def __init__(self, risk: float = 0.1, render_mode: str | None = None) -> None:
        self.risk = risk
        self.render_mode = render_mode
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._place = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        self._place = int(self.np_random.integers(100))
        info = self._info()
        info["instruction"] = "Say anything."
        return f"at {self._place}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action == "raise":
            raise RuntimeError("as you wish")
        self._place += len(action) + int(self.np_random.integers(10))
        ended = bool(self.np_random.random() < self.risk)
        return (
            f"at {self._place} after {action}",
            self._place / 7,
            ended,
            False,
            self._info() | {"success": ended},
        )

    def render(self) -> str:
        return f"[{self._place}]"

    def _info(self) -> dict:
        return {"state": {"place": self._place}, "available_actions": ["left", "right"]}


class Tagged(Walk):
    """Its description looks like markup."""

    metadata: ClassVar[dict[str, Any]] = Walk.metadata | {"description": "[/no] [bold]tags :x:"}


class OtherWalk(Walk):
    """Claims to be `Walk`, and is not."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return super().step(action + "!")


class Dice(Walk):
    """Does not promise to be deterministic."""

    metadata: ClassVar[dict[str, Any]] = Walk.metadata | {"deterministic": False, "forkable": False}


class Slow(Walk):
    """Takes as long as its action says."""

    metadata: ClassVar[dict[str, Any]] = Walk.metadata | {"inline": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action.startswith("sleep "):
            time.sleep(float(action.removeprefix("sleep ")))
        return super().step(action)


class Raises(Walk):
    """Fails at each reset."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        raise ValueError("it broke")


class Dies(Walk):
    """Takes its process with it at each reset."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        os._exit(3)


class Arm(gymnasium.Env):
    """Arrays in, nested arrays out; rewards and ends by chance."""

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["rgb_array"],
        "inline": True,
        "deterministic": True,
    }

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.observation_space = spaces.Dict(
            joints=spaces.Box(-np.inf, np.inf, (3,), np.float64),
            camera=spaces.Box(0, 255, (20, 20, 3), np.uint8),
            grip=spaces.Discrete(3),
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(), {"effort": np.zeros(2, np.float32)}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        ended, cut = (bool(each) for each in self.np_random.random(2) < 0.1)
        return self._observe(), float(action.sum()), ended, cut, {"effort": np.abs(action)}

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), 7, np.uint8)

    def _observe(self) -> dict:
        return {
            "joints": self.np_random.normal(size=3),
            "camera": self.np_random.integers(0, 256, (20, 20, 3), dtype=np.uint8),
            "grip": int(self.np_random.integers(3)),
        }


class Drift(gymnasium.Env):
    """Computes in `float32` with an integer of a nested action: its rewards tell `np.int64` from `int`."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["human", "rgb_array"], "deterministic": True}

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Dict(
            move=spaces.Discrete(5, start=-2),
            pair=spaces.Tuple((spaces.Discrete(3), spaces.MultiDiscrete([2, 2]))),
            either=spaces.OneOf((spaces.Discrete(2), spaces.Box(0, 1, (1,), np.float32))),
        )
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
        self._place: Any = np.float32(0)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._place = np.float32(0.1)
        return np.array([self._place], np.float64), {}

    def step(self, action: dict) -> tuple[np.ndarray, float, bool, bool, dict]:
        which, value = action["either"]
        pushed = value if which == 0 else 1
        self._place = self._place * np.float32(1.1) + np.float32(0.3) * action["move"]
        self._place = self._place + np.float32(0.7) * action["pair"][0] * pushed
        return np.array([self._place], np.float64), float(self._place), False, False, {}

    def render(self) -> np.ndarray:
        return np.full((4, 6, 3), 7, np.uint8)


@dataclass(frozen=True)
class Verdict:
    score: float
    outcome: str
    detail: Any = None


class Spelling(Walk):
    """Stateless: how much of a word was spelled right."""

    metadata: ClassVar[dict[str, Any]] = Walk.metadata | {"kind": "stateless", "inline": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, True, False, info | {"success": False}

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        if response == "raise":
            raise RuntimeError("as you wish")
        right = sum(one == other for one, other in zip(response, task["word"], strict=False))
        return Verdict(
            right / len(task["word"]), "correct" if response == task["word"] else "wrong", {"right": right}
        )


class Sloppy(gymnasium.Env):
    """Makes the mistakes that `roll-env check` is for."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "deterministic": True}
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"missing": {"type": "integer"}},
    }

    def __init__(self, size: int = 3) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return "go", {"thing": object()}

    def step(self, action: str) -> tuple[str, float, Any, bool, dict]:
        if not action:
            raise ValueError("no action")
        return f"{time.perf_counter_ns()}", float("nan"), np.True_, False, {}


class Reused(gymnasium.Env):
    """Gives the same array, dictionary and info each time, and writes into them."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "inline": True, "deterministic": True}
    observation_space = spaces.Dict(
        {
            "grid": spaces.Box(0, 99, (2, 2), np.int64),
            "pair": spaces.Tuple((spaces.Box(0, 99, (1,), np.int64),)),
        }
    )
    action_space = spaces.Discrete(100)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._grid, self._one = np.zeros((2, 2), np.int64), np.zeros(1, np.int64)
        self._observation = {"grid": self._grid, "pair": (self._one,)}
        self._info: dict[str, Any] = {"seen": [], "last": {"value": 0}}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._info["seen"].clear()
        return self._write(int(self.np_random.integers(50)))

    def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
        observation, info = self._write(int(action))
        return observation, 0.0, len(info["seen"]) > 2, False, info

    def _write(self, value: int) -> tuple[dict, dict]:
        self._grid[:], self._one[:], self._info["last"]["value"] = value, value, value
        self._info["seen"].append(value)
        return self._observation, self._info
