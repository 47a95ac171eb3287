"""ScaffoldName-v0: guess a hidden number."""

from typing import Annotated, Any

import gymnasium
from pydantic import Field
from rollgym import DeclaredKwargs, UnicodeText


class ScaffoldName(DeclaredKwargs, gymnasium.Env[str, str]):
    """A whole number is hidden. Put your own game in its place.

    Observations and actions are texts. A reply that is not a guess costs a step.
    """

    metadata: dict[str, Any] = {
        "description": "Guess a hidden number.",
        "observation": "The numbers that are still possible.",
        "actions": "A whole number.",
        "reward": "1 for the hidden number, else 0.",
        "render_modes": ["ansi"],
        # The seed and the actions rebuild the state, so a server can fork and restore
        # an episode.
        "deterministic": True,
        # `reset(options={"expert": True})` adds the best reply to `info`. Remove both
        # lines, and `_expert`, if your game has no expert.
        "expert": True,
        "reset_options": ["expert"],
        # Increase it whenever the same actions lead to other results.
        "version": "0",
    }

    # Clients, and the configurations of runs, may set a parameter that has a `Field`.
    def __init__(
        self,
        *,
        high: Annotated[int, Field(ge=2, le=1000, description="Greatest number.")] = 7,
        max_episode_steps: Annotated[int, Field(ge=1, description="Guesses.")] = 3,
        render_mode: str | None = None,
    ) -> None:
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self._high = high
        self._limit = max_episode_steps
        self._bounds = (1, high)
        self._secret = 1
        self._steps = 0
        self._shows_expert = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Hide a new number for the episode."""
        super().reset(seed=seed)  # seeds self.np_random, the only source of chance
        self._shows_expert = bool((options or {}).get("expert", False))
        self._bounds = (1, self._high)
        self._secret = int(self.np_random.integers(1, self._high + 1))
        self._steps = 0
        info = self._info(success=False, valid=True)
        info["instruction"] = (
            "Guess the hidden number. After each guess you are shown the numbers that"
            " are still possible. Reply with one number and nothing else."
        )
        return self._observation(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare a guess with the number."""
        self._steps += 1
        guess = self._read(action)
        found = guess == self._secret
        if guess is not None:
            low, high = self._bounds
            if guess < self._secret:
                self._bounds = (max(low, guess + 1), high)
            elif guess > self._secret:
                self._bounds = (low, min(high, guess - 1))
            else:
                self._bounds = (guess, guess)
        truncated = not found and self._steps >= self._limit
        info = self._info(success=found, valid=guess is not None)
        return self._observation(), float(found), found, truncated, info

    def render(self) -> Any:
        """Return the board as text."""
        return self._observation() if self.render_mode == "ansi" else None

    def _read(self, reply: str) -> int | None:
        """Return the number that a reply names, or None if it names none."""
        text = reply.strip()
        # Models say anything: a megabyte, other alphabets' digits, nothing at all.
        if len(text) > 4 or not (text.isascii() and text.isdecimal()):
            return None
        return int(text) if 1 <= int(text) <= self._high else None

    def _observation(self) -> str:
        low, high = self._bounds
        return f"{low} to {high}"

    def _expert(self) -> str:
        """Return the best reply: the number in the middle."""
        low, high = self._bounds
        return str((low + high) // 2)

    def _info(self, *, success: bool, valid: bool) -> dict[str, Any]:
        info: dict[str, Any] = {
            "success": success,
            "action_is_valid": valid,
            # Equal anchors are equal states: algorithms such as GiGPO compare the
            # replies that were given in them.
            "anchor": self._observation(),
            "metrics": {"guesses": self._steps},
        }
        if self._shows_expert:
            info["expert_action"] = self._expert()
        return info
