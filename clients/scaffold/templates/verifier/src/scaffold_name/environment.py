"""ScaffoldName-v0: questions whose answers are checked."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rollgym import Verdict, verifier

_MOST_READ = 200


def draw_task(random: np.random.Generator) -> Mapping[str, Any]:
    """Draw a task: its question, and the data to check an answer.

    Args:
        random: Seeded with the episode; the only source of chance.
    """
    left, right = (int(number) for number in random.integers(10, 100, size=2))
    return {"question": f"What is {left} + {right}?", "answer": str(left + right)}


@verifier(
    tasks=draw_task,
    instruction="Reply with the number and nothing else.",
    description="Sums of two numbers.",
)
def scaffold_name(response: str, task: Mapping[str, Any]) -> Verdict:
    """Score a response to a question.

    Args:
        response: The model's text, which may be anything.
        task: A task of `draw_task`, or a row of a data set with the same fields.

    Returns:
        A score from 0 to 1, and the text read. `return response == ...` does as well.
    """
    said = response.strip()[:_MOST_READ]
    if not (said.isascii() and said.isdecimal()):
        return Verdict(0.0, "unparsable", f"no number: {said!r}")
    if said != task["answer"]:
        return Verdict(0.0, "wrong", f"{said} is wrong")
    return Verdict(1.0, "correct", f"{said} is right")
