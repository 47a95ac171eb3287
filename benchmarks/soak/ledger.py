"""An environment with a state that depends on everything said to it: what a soak plays with episodes of any size."""

import hashlib
from typing import Any, ClassVar

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText


class Ledger(gymnasium.Env[str, str]):
    """Answers each action with a digest of all actions so far and with a number of its random generator.

    Args:
        length: How many steps an episode has.
        render_mode: As Gymnasium has it.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]  # Gymnasium declares it of instances
        "render_modes": [],
        "inline": True,
        "deterministic": True,
        "version": "1",
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"length": {"type": "integer", "minimum": 1}},
        "additionalProperties": False,
    }

    def __init__(self, length: int = 10, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._length = length
        self._steps = 0
        self._entries = hashlib.sha256()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        self._entries = hashlib.sha256()
        return f"0 {self.np_random.integers(2**32)}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        entry = action.encode()
        self._entries.update(len(entry).to_bytes(4, "big") + entry)
        digest = self._entries.hexdigest()
        drawn = int(self.np_random.integers(2**32))
        # An eighth of what came goes back, so that answers are large, too.
        observation = f"{self._steps} {drawn} {digest}" + action[: len(action) // 8]
        return observation, drawn / 2**32, self._steps >= self._length, False, {}
