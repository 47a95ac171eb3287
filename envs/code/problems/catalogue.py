"""All problems of our own, by split."""

from collections.abc import Sequence

from envs.code.problems.lists import LISTS
from envs.code.problems.numbers import NUMBERS
from envs.code.problems.problem import Problem
from envs.code.problems.streams import STREAMS
from envs.code.problems.texts import TEXTS
from envs.core.splits import Split, split_of_text

PROBLEMS: Sequence[Problem] = (*LISTS, *TEXTS, *NUMBERS, *STREAMS)


def problems_of(split: Split | None) -> Sequence[Problem]:
    """Return the problems of a split, or all of them."""
    return [problem for problem in PROBLEMS if split is None or split_of_text(problem.name) == split]
