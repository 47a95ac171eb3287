"""An environment that runs programs in the sandbox that the operator has named."""

from typing import Any, ClassVar

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.sandbox.core.base import Program
from rollgym.sandbox.selection import open_sandbox


class Programs(gymnasium.Env[str, str]):
    """An action is a program in Python; what it prints is the observation."""

    metadata: ClassVar[dict[str, Any]] = {"deterministic": False, "description": "Runs programs."}

    def __init__(self) -> None:
        self.action_space = self.observation_space = UnicodeText()
        self._sandbox = open_sandbox()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return self._sandbox.probe().backend, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        result = self._sandbox.run(Program("python", action))
        return result.stdout.decode(), 0.0, True, False, {"outcome": result.outcome.value}

    def close(self) -> None:
        self._sandbox.close()
