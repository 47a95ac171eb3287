"""Regular expressions of strangers: bounded in length and time.

Python's own engine backtracks for as long as it takes, and nothing in its process can end it. `regex` takes a time
limit with each call.
"""

from functools import lru_cache
from typing import Any

import regex

_LONGEST = 2_000
_SECONDS = 0.25
_KEPT = 1024


class PatternTimeoutError(Exception):
    """A regular expression took too long on a text."""

    def __init__(self, pattern: str) -> None:
        super().__init__(f"the pattern {pattern[:80]!r} takes over {_SECONDS:g} s on this text")


def check_pattern(pattern: str) -> None:
    """Look at a regular expression before it is used.

    Raises:
        ValueError: It is too long, or none.
    """
    _compiled(pattern, 0)


def searches(pattern: str, text: str, *, ignore_case: bool = False) -> bool:
    """Whether a pattern is found anywhere in a text.

    Raises:
        ValueError: It is too long, or no pattern.
        PatternTimeoutError: It takes too long.
    """
    compiled = _compiled(pattern, regex.IGNORECASE if ignore_case else 0)
    try:
        return compiled.search(text, timeout=_SECONDS) is not None
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches a text from its beginning to its end. Raises like `searches`."""
    try:
        return _compiled(pattern, 0).fullmatch(text, timeout=_SECONDS) is not None
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


def occurrences(pattern: str, text: str, *, ignore_case: bool = False) -> int:
    """How often a pattern is found in a text, without overlaps. Raises like `searches`."""
    compiled = _compiled(pattern, regex.IGNORECASE if ignore_case else 0)
    try:
        return sum(1 for _ in compiled.finditer(text, timeout=_SECONDS))
    except TimeoutError:
        raise PatternTimeoutError(pattern) from None


@lru_cache(maxsize=_KEPT)
def _compiled(pattern: str, flags: int) -> Any:
    if len(pattern) > _LONGEST:
        raise ValueError(f"a pattern has at most {_LONGEST} characters, not {len(pattern)}")
    try:
        return regex.compile(pattern, flags)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from error
