"""An environment whose observations are long texts, none of which is like another: what does a session keep of them?"""

from typing import Any, ClassVar

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText


class LongRepliesEnv(gymnasium.Env[str, str]):
    """Answers everything with a text of one length; an episode does not end.

    Args:
        length: Characters of an observation.
    """

    metadata: ClassVar[dict[str, Any]] = {"deterministic": True}  # type: ignore[misc]
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"length": {"type": "integer", "minimum": 1}},
    }

    def __init__(self, length: int = 4096) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self._length = length
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._text(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._text(), 0.0, False, False, {}

    def _text(self) -> str:
        return f"{self._steps:08d}".ljust(self._length, ".")[: self._length]
