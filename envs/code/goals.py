"""What is to be reached in a session."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Goal:
    """A task with its files and its solution.

    Attributes:
        question: What is asked.
        files: What lies in the working directory at first.
        answer: What is right; never part of a session.
        solution: What an expert types, turn by turn, before it answers.
        left: What files are to lie below `project` in the end, and whether each may be executed; None where only the
            answer counts.
    """

    question: str
    files: Mapping[str, bytes]
    answer: str = ""
    solution: Sequence[str] = ()
    left: Mapping[str, tuple[bytes, bool]] | None = field(default=None)


def same_answer(expected: str, given: str) -> bool:
    """Tell whether an answer is right: the same text but for case and quotes, or the same number to a hundredth."""
    one, two = (each.strip().strip("`'\"").strip().casefold() for each in (expected, given))
    if one == two:
        return True
    try:
        return abs(float(one) - float(two.replace(",", ""))) < 0.005 + 1e-9
    except (ValueError, OverflowError):
        return False
