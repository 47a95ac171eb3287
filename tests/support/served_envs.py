"""Environments that the server's tests serve: each does one thing that a server has to bear."""

import ctypes
import decimal
import json
import math
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from rollgym.clients.protocol.spaces import UnicodeText


class Precise(gymnasium.Env):
    """Sets a variable of the context that its code runs in, and says what it finds there."""

    metadata: ClassVar[dict[str, Any]] = {"inline": True}

    def __init__(self) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        decimal.getcontext().prec = 50
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return str(decimal.getcontext().prec), 0.0, False, False, {}


class Count(gymnasium.Env):
    """Counts its steps, and does what an action asks for."""

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["ansi"],
        "inline": True,
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "version": "7",
        "description": "Counts.",
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"length": {"type": "integer", "minimum": 1, "maximum": 100}},
        "additionalProperties": False,
    }
    operator_kwargs: ClassVar[frozenset[str]] = frozenset({"data_dir"})

    def __init__(self, length: int = 3, data_dir: str = "", render_mode: str | None = None) -> None:
        if length == 13:
            raise ValueError("thirteen brings bad luck to /home/someone/secret.txt")
        self.length = length
        self.render_mode = render_mode
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        options = options or {}
        if options.get("raise"):
            raise RuntimeError("no reset today")
        if options.get("sleep"):
            time.sleep(options["sleep"])
        if "json" in options:
            json.loads(options["json"])
        self.count = 0
        info = {"dice": int(self.np_random.integers(1000)), "expert": bool(options.get("expert"))}
        if "array" in options:
            info["total"] = float(np.sum(options["array"]))
        return f"begin {info['dice']}", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        verb, _, rest = action.partition(" ")
        if verb == "raise":
            raise RuntimeError("see /home/someone/secret.txt and C:\\Users\\someone\\x.txt")
        if verb == "sleep":
            time.sleep(float(rest))
        if verb == "exit":
            os._exit(3)
        self.count += 1
        reward = math.nan if verb == "nan" else 1.0
        info: dict[str, Any] = {"count": self.count, "dice": int(self.np_random.integers(1000))}
        if verb == "object":
            info["object"] = object()
        if verb == "special":
            info |= {"none": None, "nan": math.nan, "pair": (1, 2), "array": np.arange(3), 5: np.float64(0.5)}
        if verb == "win":
            info["success"] = True
        observation = "x" * int(rest) if verb == "large" else f"{self.count} {action}"
        return observation, reward, verb == "win" or self.count >= self.length, verb == "cut", info

    def render(self) -> str:
        return f"<{self.count}>"


class Undrawable(Count):
    """Says that it can be drawn, and cannot."""

    metadata: ClassVar[dict[str, Any]] = Count.metadata | {"render_modes": ["rgb_array"]}

    def render(self) -> str:
        raise RuntimeError("no pencil")


class Undeclared(Count):
    """Declares tools without saying what their parameters are."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        observation, info = super().reset(seed=seed, options=options)
        tools = [{"name": "look", "parameters": None}, {"function": {"name": "wait", "parameters": [1]}}, 7]
        return observation, info | {"tools": tools}


class Unsendable(Count):
    """Begins with what has no form on the wire."""

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"object": object()}


class SlowCount(Count):
    """The same in a child process: its class does not declare `inline`."""

    metadata: ClassVar[dict[str, Any]] = Count.metadata | {"inline": False}


class Chance(SlowCount):
    """Does not promise to be deterministic."""

    metadata: ClassVar[dict[str, Any]] = SlowCount.metadata | {"deterministic": False, "forkable": False}


class Arrays(gymnasium.Env):
    """Arrays in and out, with all that makes JSON hard."""

    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["rgb_array"],
        "inline": True,
        "deterministic": True,
    }

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = spaces.Dict(
            push=spaces.Box(-1.0, 1.0, (2,), np.float32), key=spaces.Discrete(3, start=1)
        )
        self.observation_space = spaces.Dict(
            wide=spaces.Box(-np.inf, np.inf, (3,), np.float64),
            picture=spaces.Box(0, 255, (40, 40), np.uint8),
            bits=spaces.MultiBinary(4),
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action: dict) -> tuple[dict, Any, Any, Any, dict]:
        return self._observe(), np.float32(action["push"].sum()), np.bool_(False), np.bool_(False), {}

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), 9, np.uint8)

    def _observe(self) -> dict:
        return {
            "wide": np.array([math.nan, math.inf, self.np_random.normal()]),
            "picture": self.np_random.integers(0, 256, (40, 40), dtype=np.uint8),
            "bits": np.array([1, 0, 1, 1], np.int8),
        }


class Equal(SlowCount):
    """Stateless: whether a response is the answer."""

    metadata: ClassVar[dict[str, Any]] = SlowCount.metadata | {"kind": "stateless"}

    def score(self, response: str, task: Mapping[str, Any]) -> dict[str, Any]:
        if response == "raise":
            raise RuntimeError("cannot score")
        if response in ("nan", "inf"):
            return {"score": float(response), "outcome": "correct", "detail": None}
        if response.startswith("sleep "):
            time.sleep(float(response.removeprefix("sleep ")))
        if response.startswith("hold "):
            # As a regular expression does, it lets no other thread run.
            ctypes.PyDLL(None).usleep(int(1e6 * float(response.removeprefix("hold "))))
        good = response == task["answer"]
        return {"score": float(good), "outcome": "correct" if good else "wrong", "detail": None}


class Once(Count):
    """Can be made once in a process, which is what a server does at its start."""

    _made = 0

    def __init__(self) -> None:
        super().__init__()
        Once._made += 1
        if Once._made > 1:
            raise RuntimeError("there is only one")


class _Frozen(dict):
    """A mapping that is a key, which a plain one cannot be."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 7


class Tangled(SlowCount):
    """Gives what loses its nature on the way to the server."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, info | {_Frozen(a=1): 1}


class OddMessages(Count):
    """Says by a name of ours what is not of its form."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, info | {"messages": ["said", 3]}


class SlowToClose(Count):
    """Is closed as slowly as it is told to be when it is made; so may its making be."""

    metadata: ClassVar[dict[str, Any]] = Count.metadata | {"inline": False, "thread": True}
    kwargs_schema: ClassVar[dict[str, Any]] = {"type": "object"}
    _made = 0

    def __init__(self, makes: tuple[float, ...] = (), closes: float = 0.0) -> None:
        super().__init__()
        self._closes = closes
        if makes:
            SlowToClose._made += 1
            time.sleep(makes[SlowToClose._made % len(makes)])

    def close(self) -> None:
        time.sleep(self._closes)
