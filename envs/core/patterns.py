"""Regular expressions of strangers: bounded in length and time.

Python's own engine backtracks for as long as it takes, and nothing in its process can end it. `regex` takes a time
limit with each call; what it makes of repetitions within repetitions, which no limit holds for, is counted before.
"""

import re
from functools import lru_cache
from typing import Any

import regex

_LONGEST = 2_000
_LARGEST = 20_000
SECONDS = 0.25
"""Default time limit of a search."""

_KEPT = 1024
_KEPT_LARGE = 32
_SMALL = 1_000
# What the count of repetitions does not see through: comments, flags that change how signs are read, and errors that a
# match may have. Other dialects lack all but the first two.
_ODD = r"\(\?\#|\(\?[a-zA-Z0-9]*(?:x|V1)[a-zA-Z0-9]*[-:)]|\{\d*<?=?[deis]"
_PART = re.compile(
    rf"\\.|(?P<odd>{_ODD})|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<open>\()|(?P<close>\))|(?P<times>\{{\d*,?\d*\}})|.",
    re.DOTALL,
)


class TooMuchWorkError(Exception):
    """An untrusted pattern or schema takes too long on a text or a value."""


def check_pattern(pattern: str) -> None:
    """Look at a regular expression before it is used.

    Raises:
        ValueError: It is too long, or none.
    """
    _compiled(pattern, 0)


def searches(pattern: str, text: str, *, ignore_case: bool = False, seconds: float = SECONDS) -> bool:
    """Whether a pattern is found anywhere in a text.

    Args:
        pattern: The regular expression.
        text: The text to search.
        ignore_case: Whether large and small letters are the same.
        seconds: Time limit of the search.

    Raises:
        ValueError: It is too long, or not a valid pattern.
        TooMuchWorkError: The search takes too long.
    """
    compiled = _compiled(pattern, regex.IGNORECASE if ignore_case else 0)
    try:
        return compiled.search(text, timeout=max(seconds, 0.0)) is not None
    except TimeoutError:
        raise _too_much(pattern, seconds) from None


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches a text from its beginning to its end. Raises like `searches`."""
    try:
        return _compiled(pattern, 0).fullmatch(text, timeout=SECONDS) is not None
    except TimeoutError:
        raise _too_much(pattern, SECONDS) from None


def occurrences(pattern: str, text: str, *, ignore_case: bool = False) -> int:
    """How often a pattern is found in a text, without overlaps. Raises like `searches`."""
    compiled = _compiled(pattern, regex.IGNORECASE if ignore_case else 0)
    try:
        return sum(1 for _ in compiled.finditer(text, timeout=SECONDS))
    except TimeoutError:
        raise _too_much(pattern, SECONDS) from None


def _compiled(pattern: str, flags: int) -> Any:
    if len(pattern) > _LONGEST:
        raise ValueError(f"a pattern has at most {_LONGEST} characters, not {len(pattern)}")
    size = _size(pattern)
    if size > _LARGEST:
        raise ValueError(f"{pattern[:80]!r} repeats too much: at most {_LARGEST} characters, written out")
    return (_kept_small if size <= _SMALL else _kept_large)(pattern, flags)


def _compile(pattern: str, flags: int) -> Any:
    try:
        return regex.compile(pattern, flags, cache_pattern=False)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise ValueError(f"{pattern[:80]!r} is no regular expression: {error}") from error


# What is compiled takes up to 100 bytes for each character, written out.
_kept_small = lru_cache(maxsize=_KEPT)(_compile)
_kept_large = lru_cache(maxsize=_KEPT_LARGE)(_compile)


@lru_cache(maxsize=_KEPT)
def _size(pattern: str) -> int:
    """Return a pattern's length with all repetitions written out at their maximum.

    Raises:
        ValueError: It has what cannot be counted.
    """
    groups: list[int] = [0]
    last = 0
    for part in _PART.finditer(pattern):
        # A set with a class in it may end later than it seems to: [[:alpha:](].
        if part["odd"] or (part["set"] and "[:" in part["set"][:-2] and part["set"].endswith(":]")):
            raise ValueError(
                f"{part[0][:80]!r} is not taken in a regular expression: comments, the flags x and V1, fuzzy matches "
                f"and classes such as [:alpha:] are not; before a brace that is meant, write a backslash"
            )
        if part["open"]:
            groups.append(0)
            continue
        if part["close"] and len(groups) > 1:
            last = max(groups.pop(), 1)
        elif part["times"]:
            times = max((int(number) for number in re.findall(r"\d+", part["times"])), default=1)
            more = last * max(times, 1) - last
            groups[-1] += more
            last += more
            continue
        else:
            last = 1
        groups[-1] += last
    return sum(groups)


def _too_much(pattern: str, seconds: float) -> TooMuchWorkError:
    return TooMuchWorkError(f"the pattern {pattern[:80]!r} takes over {seconds:.3g} s on this text")
