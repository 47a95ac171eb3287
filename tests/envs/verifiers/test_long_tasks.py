"""What a verdict says of a task is for people, however long what the task says is."""

import pytest

from rollgym.envs.verifiers.arithmetic import ArithmeticEnv
from rollgym.envs.verifiers.mathematics import MathEnv
from rollgym.envs.verifiers.multiple_choice import MultipleChoiceEnv
from rollgym.envs.verifiers.question_answering import QuestionAnsweringEnv
from rollgym.envs.verifiers.reasoning_gym import ReasoningGymEnv

LONG = "a" * 1_000_000


@pytest.mark.parametrize(
    ("verifier", "task"),
    [
        (ArithmeticEnv(), {"question": "2 + 2", "answer": LONG}),
        (ArithmeticEnv(), {"question": LONG}),
        (MathEnv(backend="none"), {"question": "?", "answer": LONG}),
        (MultipleChoiceEnv(), {"question": "?", "options": ["1", "2"], "answer": LONG}),
        (QuestionAnsweringEnv(), {"question": "?", "answer": LONG}),
        (QuestionAnsweringEnv(metric="number"), {"question": "?", "answer": LONG}),
        (ReasoningGymEnv(), {"dataset": LONG, "seed": 1}),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_long_task_is_not_repeated(verifier, task):
    verdict = verifier.score("<answer>4</answer>", task)
    assert verdict.outcome in ("wrong", "error")
    assert len(verdict.detail) < 1000
    refusal = ""
    try:
        verifier.reset(options={"question": "?", **task})
    except ValueError as error:
        refusal = str(error)
    assert len(refusal) < 1000
