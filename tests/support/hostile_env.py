"""An environment whose every text tries to become a part of the page."""

from typing import Any, ClassVar

import gymnasium

from rollgym.clients.protocol.spaces import UnicodeText

IMAGE = "<img src=/stolen onerror=\"window.stolen='image'\">"
SCRIPT = "<script>window.stolen='script'</script>"
ATTRIBUTE = '"><svg onload="window.stolen=\'attribute\'">'
LINK = "javascript:window.stolen='link'"


class Hostile(gymnasium.Env):
    metadata: ClassVar[dict[str, Any]] = {
        "render_modes": ["ansi"],
        "inline": True,
        "deterministic": True,
        "description": IMAGE + SCRIPT,
        "version": SCRIPT,
    }
    kwargs_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            ATTRIBUTE: {"type": "string", "description": IMAGE},
            "choice": {"enum": [SCRIPT, ATTRIBUTE], "default": IMAGE},
        },
        "additionalProperties": False,
    }

    def __init__(self, **kwargs: Any) -> None:
        self.action_space = self.observation_space = UnicodeText()

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        super().reset(seed=seed)
        return IMAGE + SCRIPT, self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action == LINK:
            raise RuntimeError(IMAGE + SCRIPT)
        return ATTRIBUTE + action, 0.0, False, False, self._info()

    def render(self) -> str:
        return SCRIPT + IMAGE

    def _info(self) -> dict:
        return {"instruction": SCRIPT + IMAGE, "available_actions": [ATTRIBUTE, LINK], IMAGE: SCRIPT}
