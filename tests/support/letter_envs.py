"""A game of letters whose reward players who know nothing of it never find, with example replies and without."""

import string
from collections.abc import Mapping
from typing import Any

from rollgym.envs.core.text_game import Move, Refusal, TextGame

WORDS = ("joy", "gym", "ivy", "zoo", "pry", "fog")
MISSES = 14


class Letters(TextGame[str]):
    """Guess a word letter by letter."""

    metadata = {"description": "Guess a word letter by letter.", "max_episode_steps": 15}

    def __init__(self, *, render_mode: str | None = None) -> None:
        super().__init__("a letter", "e", max_episode_steps=15, render_mode=render_mode)

    def start_episode(self, options: Mapping[str, Any]) -> None:
        self._word = WORDS[int(self.np_random.integers(len(WORDS)))]
        self._guessed: list[str] = []

    def parse_action(self, text: str) -> str | Refusal:
        known = len(text) == 1 and text in string.ascii_lowercase
        return text if known else Refusal("Reply with a small letter.")

    def apply_action(self, action: str) -> Move:
        if action not in self._guessed:
            self._guessed.append(action)
        solved = set(self._word) <= set(self._guessed)
        lost = len(set(self._guessed) - set(self._word)) > MISSES
        return Move(float(solved), terminated=solved or lost, success=solved)

    def draw_board(self) -> str:
        return "".join(letter if letter in self._guessed else "_" for letter in self._word)

    def state_info(self) -> dict[str, Any]:
        return {"state": {"guessed": self._guessed}, "anchor": "".join(sorted(self._guessed))}

    def describe_rules(self) -> str:
        return "Guess the word letter by letter."


class LettersWithExamples(Letters):
    """The same, with replies that make sense."""

    metadata = {"example_replies": list(string.ascii_lowercase)}


class NeverPaid(LettersWithExamples):
    """Nobody is paid in it, whatever is said."""

    def apply_action(self, action: str) -> Move:
        return super().apply_action(action)._replace(reward=0.0, success=False)


class WrongExamples(Letters):
    """One of its examples is no action."""

    metadata = {"example_replies": ["e", "E"]}


class ExamplesAsText(Letters):
    """Its examples are no list."""

    metadata = {"example_replies": "e"}
