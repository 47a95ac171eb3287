"""Mastermind-v0: find a hidden code; each guess is answered with the number of right places and of right colours."""

import re
from collections.abc import Mapping, Sequence
from itertools import permutations, product
from typing import Annotated, Any, Unpack

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rollgym.envs.core.text_game import GameKwargs, Move, Refusal, TextGame

_MOST_CODES = 100_000
_CODE = re.compile(r"[1-9](?:[\s,;]?\s?[1-9]){0,7}", re.ASCII)

Code = tuple[int, ...]


class MastermindEnv(TextGame[Code]):
    """A hidden code of digits.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = TextGame.metadata | {
        "description": "Find a hidden code from what each guess has right.",
        "observation": "The guesses so far, each with its right places and right digits.",
        "actions": "The digits of a guess.",
        "reward": "1 when the code is found, else 0.",
        "max_episode_steps": 12,
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }

    def __init__(
        self,
        *,
        length: Annotated[int, Field(ge=1, le=8, description="Digits of the code.")] = 4,
        colours: Annotated[int, Field(ge=2, le=9, description="The digits are 1 to this.")] = 6,
        duplicates: Annotated[bool, Field(description="Whether a digit may occur more than once.")] = True,
        max_episode_steps: Annotated[int, Field(ge=1, description="Guesses.")] = 12,
        **common: Unpack[GameKwargs],
    ) -> None:
        super().__init__(
            f"{length} digits from 1 to {colours}",
            " ".join(str(1 + index % colours) for index in range(length)),
            max_episode_steps=max_episode_steps,
            **common,
        )
        if colours**length > _MOST_CODES:
            raise ValueError(
                f"length {length} and colours {colours} make more than {_MOST_CODES} codes: shorten the code, or take "
                "fewer colours"
            )
        if not duplicates and colours < length:
            raise ValueError(f"{length} different digits need as many colours; there are {colours}")
        self._length = length
        self._colours = colours
        self._duplicates = duplicates
        self._secret: Code = (1,) * length
        self._guesses: list[tuple[Code, int, int]] = []
        self._candidates: NDArray[np.int8] | None = None

    def start_episode(self, options: Mapping[str, Any]) -> None:
        digits = self.np_random.choice(self._colours, self._length, replace=self._duplicates)
        self._secret = tuple((digits + 1).tolist())
        self._guesses = []
        self._candidates = None

    def parse_action(self, text: str) -> Code | Refusal:
        said = text.strip("\"'`“”‘’()[]. \t\r\n")
        code = tuple(map(int, re.findall(r"\d", said))) if _CODE.fullmatch(said) else ()
        if len(code) != self._length or max(code) > self._colours:
            return Refusal(f"A code has {self._length} digits from 1 to {self._colours}.")
        if not self._duplicates and len(set(code)) < self._length:
            return Refusal("All digits of a code are different.")
        return code

    def apply_action(self, action: Code) -> Move:
        places, colours = feedback(action, self._secret)
        self._guesses.append((action, places, colours))
        solved = action == self._secret
        return Move(float(solved), solved, solved)

    def draw_board(self) -> str:
        rows = [
            f"{self.describe_action(code)}: {places} in the right place, {colours} in a wrong place"
            for code, places, colours in self._guesses
        ]
        return "\n".join(rows) or "No guess yet."

    def state_info(self) -> dict[str, Any]:
        guesses = [[list(code), places, colours] for code, places, colours in self._guesses]
        return {"anchor": str(guesses), "state": {"guesses": guesses}}

    def describe_rules(self) -> str:
        more = "digits may occur more than once" if self._duplicates else "all digits are different"
        return (
            f"I have a secret code of {self._length} digits from 1 to {self._colours}; {more}. Guess it. After each "
            "guess you are told how many digits stand in the right place, and how many others occur in the code, but "
            "in a wrong place."
        )

    def describe_action(self, action: Code) -> str:
        return " ".join(map(str, action))

    def expert_reply(self) -> str:
        """Guess a code that would have been answered as all guesses were: the first one, in the order of codes."""
        if self._candidates is None:
            digits = range(1, self._colours + 1)
            codes = (
                product(digits, repeat=self._length)
                if self._duplicates
                else permutations(digits, self._length)
            )
            self._candidates = np.array(list(codes), dtype=np.int8)
        left = consistent(self._candidates, self._guesses)
        # A varied first guess tells more than 1 1 1 1.
        return self.describe_action(tuple(left[len(left) // 3].tolist()))


def feedback(guess: Code, secret: Code) -> tuple[int, int]:
    """Return how many digits are in the right place, and how many others occur in a wrong one."""
    places = sum(one == other for one, other in zip(guess, secret, strict=True))
    common = sum(min(guess.count(digit), secret.count(digit)) for digit in set(guess))
    return places, common - places


def consistent(codes: NDArray[np.int8], guesses: Sequence[tuple[Code, int, int]]) -> NDArray[np.int8]:
    """Return those codes, one a row, that could be the secret after guesses and their feedback."""
    for guess, places, colours in guesses:
        row = np.array(guess, dtype=np.int8)
        right = (codes == row).sum(axis=1)
        common = sum(np.minimum((codes == digit).sum(axis=1), guess.count(digit)) for digit in set(guess))
        codes = codes[(right == places) & (common - right == colours)]
    return codes
