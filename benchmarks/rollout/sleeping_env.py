"""An environment whose step takes as long as its action says: the times of a profile, in a real server's process."""

import time
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from rollgym.clients.protocol.spaces import UnicodeText

_DIGITS = "0123456789.e+- "


class Sleeping(gymnasium.Env[str, str]):
    """Sleeps so many seconds and says so; kwargs say after how many turns it ends."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, turns: int = 1_000_000) -> None:
        self.action_space = spaces.Text(64, charset=_DIGITS)
        self.observation_space = spaces.Text(64)
        self._turns = turns
        self._taken = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        return "ready", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(float(action))
        self._taken += 1
        return "slept", 0.0, self._taken >= self._turns, False, {}


class Turns(gymnasium.Env[str, str]):
    """Takes any text and ends after so many turns; it costs nothing."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"turns": {"type": "integer", "minimum": 1}},
        "additionalProperties": False,
    }

    def __init__(self, turns: int = 5) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._turns = turns
        self._taken = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._taken = 0
        return "Where to?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._taken += 1
        return "You moved. Where to?", 0.0, self._taken >= self._turns, False, {}
