"""An environment that says by name what its rewards are made of."""

from typing import Any

import gymnasium
from gymnasium import spaces


class NamedRewards(gymnasium.Env[str, str]):
    """Pays 1 for `go`, half as much for a polite word beside it, and takes 0.25 off for anything else."""

    metadata: dict[str, Any] = {"render_modes": []}
    observation_space = spaces.Text(64)
    action_space = spaces.Text(64)

    def __init__(self) -> None:
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return "step 0", {"anchor": "state 0"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        parts = {"moved": 1.0} if action.startswith("go") else {}
        parts |= {"polite": 0.5} if "please" in action else {}
        penalty = 0.0 if parts else -0.25
        info = {
            "anchor": f"state {self._steps}",
            "action_is_valid": bool(parts),
            "format_penalty": penalty,
            "reward_parts": parts,
        }
        return f"step {self._steps}", sum(parts.values()) + penalty, False, False, info
