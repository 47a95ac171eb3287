"""The verifier passes the check of rollgym, and gives the right scores."""

import pytest
from rollgym import check_environment

from scaffold_name import scaffold_name

TASK = {"question": "What is 12 + 30?", "answer": "42"}


def test_it_passes_the_check_of_rollgym() -> None:
    check_environment("scaffold_name.environment:scaffold_name")


@pytest.mark.parametrize(
    ("response", "score", "outcome"),
    [
        ("42", 1.0, "correct"),
        (" 42\n", 1.0, "correct"),
        ("41", 0.0, "wrong"),
        ("forty-two", 0.0, "unparsable"),
        ("", 0.0, "unparsable"),
        ("4" * 1_000_000, 0.0, "wrong"),
    ],
)
def test_a_response_gets_its_score(response: str, score: float, outcome: str) -> None:
    verdict = scaffold_name().score(response, TASK)
    assert (verdict.score, verdict.outcome) == (score, outcome)


def test_equal_seeds_draw_equal_tasks() -> None:
    env = scaffold_name()
    assert env.reset(seed=3)[0] == env.reset(seed=3)[0]
