"""Which of the known names was probably meant by one that is unknown."""

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

_LEAST = 0.6
"""Similarity, from 0 to 1, below which a name is not suggested."""
_MARGIN = 0.1
"""How much less similar than the best name another one may be: what is far behind it was not meant."""
_VERSION = re.compile(r"-v\d+$")
"""What ids of environments end with: it makes no two of them alike."""
_LONGEST = 100
"""Characters of the longest name that is compared; the time grows with the square."""


def near_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known names that are most similar to an unknown one, best first.

    Args:
        name: The unknown name. Upper and lower case are the same.
        known: The names that there are.
        most: How many are returned at most.
    """
    if len(name) > _LONGEST:
        return []
    matcher = SequenceMatcher(b=_compared(name))
    scored: list[tuple[float, str]] = []
    for each in known:
        matcher.set_seq1(_compared(each[:_LONGEST]))
        if matcher.real_quick_ratio() >= _LEAST and (score := matcher.ratio()) >= _LEAST:
            scored.append((score, each))
    scored.sort(key=lambda pair: (-pair[0], pair[1]))
    return [each for score, each in scored if score >= scored[0][0] - _MARGIN][:most]


def _compared(name: str) -> str:
    return _VERSION.sub("", name.lower())


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Return "did you mean A or B?" for an unknown name; empty if no known name is similar."""
    return suggestion(near_names(name, known, most))


def suggestion(names: Sequence[str]) -> str:
    """Return "did you mean A or B?" for names that were probably meant; empty if there are none."""
    return f"did you mean {alternatives(names)}?" if names else ""


def alternatives(names: Sequence[str]) -> str:
    """Return "A, B or C" for names of which one is to be chosen."""
    return " or ".join([", ".join(names[:-1]), *names[-1:]] if len(names) > 1 else names)
