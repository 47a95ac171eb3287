"""GuessNumber-v0: find a hidden number; each guess is answered with higher or lower."""

from collections.abc import Mapping
from typing import Annotated, Any, Unpack

from pydantic import Field

from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame, read_numbers

_LARGEST = 10**9


class GuessNumberEnv(TextGame[int]):
    """A hidden whole number. Bisection needs at most `optimal_steps` guesses.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TextGame.metadata | {
        "description": "Find a hidden number; each guess is told higher or lower.",
        "observation": "The guesses so far, each with higher or lower.",
        "actions": "A whole number.",
        "reward": "1 when the number is found, else 0.",
        "max_episode_steps": 10,
        "baselines": {"random": 0.04, "constant action": 0, "blind": 0.08, "expert": 1},
    }

    def __init__(
        self,
        *,
        low: Annotated[int, Field(ge=0, le=_LARGEST - 1, description="The least number that it may be.")] = 1,
        high: Annotated[int, Field(ge=1, le=_LARGEST - 1, description="The greatest.")] = 100,
        max_episode_steps: Annotated[int, Field(ge=1, description="Guesses.")] = 10,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(
            f"a number from {low} to {high}", str(high), max_episode_steps=max_episode_steps, **common
        )
        if low >= high:
            raise ValueError(f"low must be below high, not {low} and {high}")
        self._bounds = (low, high)
        self._low, self._high = low, high
        self._secret = low
        self._guesses: list[str] = []

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._low, self._high = self._bounds
        self._secret = int(self.np_random.integers(self._low, self._high + 1))
        self._guesses = []

    def parse_action(self, text: str) -> int | Refusal:
        numbers = read_numbers(text, 1)
        low, high = self._bounds
        if numbers is None or not low <= numbers[0] <= high:
            return Refusal(f"Guess one whole number from {low} to {high}.")
        return numbers[0]

    def apply_action(self, action: int) -> Move:
        if action == self._secret:
            self._low = self._high = action
            self._guesses.append(f"{action}: right")
            return Move(1.0, True, True)
        if action < self._secret:
            self._low = max(self._low, action + 1)
            self._guesses.append(f"{action}: higher")
        else:
            self._high = min(self._high, action - 1)
            self._guesses.append(f"{action}: lower")
        return Move(0.0, False, False)

    def draw_board(self) -> str:
        low, high = self._bounds
        return "\n".join([f"The number is from {low} to {high}.", *self._guesses])

    def state_info(self) -> dict[str, Any]:
        bounds = {"low": self._low, "high": self._high}
        return {"anchor": f"{self._low} {self._high}", "state": {**bounds, "guesses": list(self._guesses)}}

    def describe_rules(self) -> str:
        low, high = self._bounds
        return (
            f"I think of a whole number from {low} to {high}. Guess it; after each guess you are told whether the "
            "number is higher or lower."
        )

    def optimal_steps(self) -> int:
        """Return how many guesses suffice for any number: bisection halves the remaining range."""
        return (self._high - self._low + 1).bit_length()

    def expert_reply(self) -> str:
        return str((self._low + self._high) // 2)
