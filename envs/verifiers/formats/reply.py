"""A response as rules of form look at it."""

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

from rollgym.clients.replies.thinking import strip_thinking

Unit = Literal["words", "characters", "tokens"]
_UNITS: tuple[Unit, ...] = ("words", "characters", "tokens")


class Reply:
    """One response.

    Args:
        raw: All of it.
        tokens: How many tokens it has, where whoever sampled it says so.
    """

    def __init__(self, raw: str, tokens: int | None = None) -> None:
        self.raw = raw
        self._tokens = tokens

    @cached_property
    def spoken(self) -> str:
        """What stands outside think tags, without space around it."""
        return strip_thinking(self.raw).strip()

    @cached_property
    def words(self) -> list[str]:
        """What stands between spaces, thinking included."""
        return self.raw.split()

    def length(self, unit: Unit) -> int:
        """Return how long it is, thinking included.

        Raises:
            ValueError: Tokens are asked for, and nobody said how many there are.
        """
        if unit == "characters":
            return len(self.raw)
        if unit == "words":
            return len(self.words)
        if self._tokens is None:
            raise ValueError("a length in tokens needs the task's field 'tokens': how many the response has")
        return self._tokens


Measure = Callable[..., float]
"""Rates a reply from 0 to 1, given the arguments of a rule."""


def unit(value: Any) -> Unit:
    """Read a unit of length."""
    for each in _UNITS:
        if value == each:
            return each
    raise ValueError(f"one of {', '.join(_UNITS)} is needed, not {value!r}")
