"""Composite-v0: gates first, then a weighted mean."""

import json

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.clients.client.client import EnvClient
from rollgym.envs.verifiers.composite import CompositeEnv
from tests.support.processes import env_server

TASK = {"question": "2 + 3", "answer": "5"}
WEIGHED = [
    {"verifier": "Arithmetic-v0", "weight": 3},
    {"verifier": "QA-v0", "weight": 1, "task": {"metric": "contains"}},
]
GATED = [{"verifier": "QA-v0", "gate": 1, "kwargs": {"metric": "contains"}}, {"verifier": "Arithmetic-v0"}]


@pytest.mark.parametrize(
    ("response", "score", "outcome"),
    [
        ("<answer>5</answer>", 1.0, "correct"),
        ("<answer>4 or 5</answer>", 0.25, "partial"),
        ("<answer>6</answer>", 0.0, "wrong"),
        ("", 0.0, "unparsable"),
    ],
)
def test_scores_are_weighed(response, score, outcome):
    verdict = CompositeEnv(parts=WEIGHED).score(response, TASK)
    assert (verdict.score, verdict.outcome) == (pytest.approx(score), outcome)


def test_a_gate_that_is_not_passed_decides():
    composite = CompositeEnv(parts=GATED)
    verdict = composite.score("<answer>6</answer>", TASK)
    assert (verdict.score, verdict.outcome) == (0.0, "wrong")
    assert verdict.detail.startswith("gate QA-v0: contains: 6")
    assert composite.score("5", TASK).outcome == "correct"
    # The gate is passed, and adds nothing to the score.
    assert composite.score("<answer>5 and 7</answer>", TASK).score == 0.0


def test_a_fault_of_a_part_is_no_score():
    parts = [{"verifier": "Math-v0", "kwargs": {"backend": "none"}}, {"verifier": "QA-v0", "weight": 9}]
    verdict = CompositeEnv(parts=parts).score(r"\boxed{x^2}", {"question": "?", "answer": "x*x"})
    assert (verdict.score, verdict.outcome) == (0.0, "error")
    assert verdict.detail.startswith("Math-v0: needs_math_verify")


def test_an_operator_may_set_what_clients_may_not():
    composite = CompositeEnv(operator_parts=[{"verifier": "Math-v0", "kwargs": {"processes": 2}}])
    assert composite.score("5", TASK).outcome == "correct"
    composite.close()


def test_tasks_come_from_the_part_that_is_named():
    composite = CompositeEnv(parts=[{"verifier": "QA-v0"}, {"verifier": "MultipleChoice-v0"}], tasks=1)
    check_env(composite)
    _, info = composite.reset(seed=3)
    again = CompositeEnv(parts=[{"verifier": "MultipleChoice-v0"}])
    again.reset(seed=3)
    assert composite.task == again.task
    assert "box" in info["instruction"]
    assert "<answer>" in info["instruction"]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"parts": []}, "parts must be a list of 1 to 16 objects"),
        ({"parts": [{"verifier": "Format-v0", "weight": 0}]}, "at least one with a weight"),
        ({"parts": [{"verifier": "QA-v0", "weight": float("inf")}]}, "finite sum"),
        ({"parts": [{"verifier": "QA-v0", "weight": 1e308}] * 2}, "finite sum"),
        ({"parts": [{"verifier": "Maths-v0"}]}, "'Maths-v0' is no built-in verifier"),
        ({"parts": [{"verifier": "FrozenLake-v0"}]}, "'FrozenLake-v0' is no built-in verifier"),
        ({"parts": [{"verifier": "QA-v0", "wait": 1}]}, "a part has a 'verifier'"),
        ({"parts": [{"verifier": "QA-v0", "weight": -1}]}, "must not be negative"),
        ({"parts": [{"verifier": "QA-v0", "gate": 1}]}, "gates alone pay nothing"),
        (
            {"parts": [{"verifier": "QA-v0", "kwargs": {"metric": "x"}}]},
            "kwargs of QA-v0: metric must be one of 'auto'",
        ),
        (
            {"parts": [{"verifier": "Math-v0", "kwargs": {"processes": 9}}]},
            "processes of Math-v0 is for operators",
        ),
        ({"tasks": 3}, "tasks must be the place of a part"),
    ],
)
def test_bad_kwargs_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CompositeEnv(**kwargs)


async def test_an_operator_composes_one_for_everybody():
    composed = json.dumps({"parts": GATED})
    with env_server("--workers", "1", "--operator-kwargs", f"Composite-v0={composed}") as url:
        async with EnvClient(url) as client:
            items = [{**TASK, "response": said} for said in ("<answer>5</answer>", "<answer>6</answer>")]
            verdicts = await client.verify("Composite-v0", items)
    assert [verdict.outcome for verdict in verdicts] == ["correct", "wrong"]
    assert "gate QA-v0" in verdicts[1].detail
