"""What the ledger must answer, reckoned from its rules alone: nothing of the environment is used."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from numpy.random import PCG64, Generator

SMALLEST, LARGEST = 10_000, 10_000_000
"""Bytes of an episode."""
_FEWEST, _MOST = 8, 60
# Half of what a request may have, since some letters take more bytes in JSON.
_LONGEST_ACTION = 400_000
# Of one byte, of two, of three and of four, and such as JSON writes with an escape.
_ALPHABETS = ("abcdefgh", "äöüßéèñç", "一二三四五六七八", "🎲🧊🎯🧩🎮🕹🃏♟", 'a"b\\c\n\td')


@dataclass(frozen=True)
class Episode:
    """One episode: its length and all of its actions follow from a number.

    Attributes:
        number: That number, which is the seed of its reset, too.
        largest: Bytes that no episode passes.
    """

    number: int
    largest: int = LARGEST

    @property
    def size(self) -> int:
        """About how many bytes its actions have, evenly spread over the orders of magnitude."""
        share = random.Random(f"size {self.number}").random()
        return int(SMALLEST * (self.largest / SMALLEST) ** share)

    @property
    def length(self) -> int:
        """How many steps it has."""
        drawn = random.Random(f"length {self.number}").randint(_FEWEST, _MOST)
        return max(drawn, -(-self.size // _LONGEST_ACTION))

    def actions(self) -> Iterator[str]:
        """All of its actions."""
        chance = random.Random(f"actions {self.number}")
        alphabet = chance.choice(_ALPHABETS)
        for index in range(self.length):
            word = f"{index}:" + "".join(chance.choices(alphabet, k=50))
            yield word * max(1, round(self.size / self.length / len(word.encode())))

    def answers(self) -> Iterator[tuple[str, list[Any]]]:
        """The observation of its reset, and then of each step the action and what it answers.

        Yields:
            An action (none for the reset) and observation, reward, terminated and truncated.
        """
        drawing = Generator(PCG64(self.number))
        yield "", [f"0 {drawing.integers(2**32)}", 0.0, False, False]
        written = sha256()
        for index, action in enumerate(self.actions(), 1):
            said = action.encode()
            written.update(len(said).to_bytes(4, "big"))
            written.update(said)
            drawn = int(drawing.integers(2**32))
            observation = f"{index} {drawn} {written.copy().hexdigest()}{action[: len(action) // 8]}"
            yield action, [observation, drawn / 2**32, index == self.length, False]
