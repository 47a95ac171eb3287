"""What holds for every verifier that ships: there is a verdict, whatever a response says and whoever wrote the task."""

import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.registry import builtin_environments
from rollgym.envs.verifiers.arithmetic import ArithmeticEnv
from rollgym.envs.verifiers.base import Verdict, VerifierEnv
from rollgym.envs.verifiers.mathematics import MathEnv
from rollgym.envs.verifiers.multiple_choice import MultipleChoiceEnv
from rollgym.envs.verifiers.question_answering import QuestionAnsweringEnv
from rollgym.envs.verifiers.reasoning_gym import ReasoningGymEnv
from tests.support.hostile_answers import ENDED_BY_A_CLOCK, HOSTILE_ANSWERS
from tests.support.sandboxes import working_sandbox

OUTCOMES = ("correct", "wrong", "partial", "unparsable", "timeout", "error")
SIGNS = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "\\boxed{",
            "}",
            "[[YES]]",
            "```json\n",
            "```",
            "{",
            "[",
            '"',
        ),
        *(
            "\n",
            "\n\n",
            "***",
            "* ",
            "- ",
            "<<",
            ">>",
            ",",
            ".",
            "!",
            "1",
            "-1/0",
            "9" * 400,
            "\x00",
            "\ud800",
            "漢",
        ),
    ]
)
RESPONSES = st.text(max_size=200) | st.lists(SIGNS | st.text(max_size=8), max_size=30).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def verifiers() -> dict[str, type[VerifierEnv]]:
    classes = {env_id: environment.load() for env_id, environment in builtin_environments().items()}
    return {env_id: each for env_id, each in classes.items() if each.metadata.get("kind") == "stateless"}


VERIFIERS = verifiers()
CHECKED_TASKS = ("InstructionFollowing-v0", "Format-v0", "Judge-v0")


@functools.cache
def verifier(env_id: str) -> VerifierEnv:
    return VERIFIERS[env_id]()


def assert_verdict(verdict: Verdict) -> None:
    assert verdict.outcome in OUTCOMES
    assert 0.0 <= verdict.score <= 1.0
    assert math.isfinite(verdict.score)
    assert (verdict.score == 1.0) == (verdict.outcome == "correct")
    if verdict.outcome not in ("correct", "partial"):
        assert verdict.score == 0.0
    assert isinstance(verdict.detail, str)


@pytest.mark.parametrize("env_id", VERIFIERS)
@settings(max_examples=40)
@given(response=RESPONSES, seed=st.integers(0, 50))
def test_every_response_has_a_verdict(env_id, response, seed):
    verifier(env_id).reset(seed=seed)
    verdict = verifier(env_id).score(response, verifier(env_id).task)
    assert_verdict(verdict)
    # Nothing is kept from one response to the next.
    assert verifier(env_id).score(response, verifier(env_id).task) == verdict


@pytest.mark.parametrize("env_id", CHECKED_TASKS)
@settings(max_examples=60)
@given(response=RESPONSES, seed=st.integers(0, 50), data=st.data())
def test_every_task_has_a_verdict(env_id, response, seed, data):
    verifier(env_id).reset(seed=seed)
    task = dict(verifier(env_id).task)
    field = data.draw(
        st.sampled_from([*task, "mode", "reward", "template", "tokens", "ground_truth", "func_name"])
    )
    task[field] = data.draw(VALUES)
    if data.draw(st.booleans()):
        del task[data.draw(st.sampled_from(sorted(task)))]
    assert_verdict(verifier(env_id).score(response, task))


@pytest.mark.parametrize("env_id", sorted(VERIFIERS.keys() - {"Judge-v0"}))
def test_no_response_is_the_reason_that_nothing_is_known(env_id):
    environment = verifier(env_id)
    if env_id == "CodeTests-v0":
        # Each costs a sandbox.
        working_sandbox()
        answers = {
            name: HOSTILE_ANSWERS[name] for name in ("round brackets", "a long number", "null characters")
        }
    else:
        answers = {name: each for name, each in HOSTILE_ANSWERS.items() if name not in ENDED_BY_A_CLOCK}
    environment.reset(seed=7)
    task = environment.task
    for name, answer in answers.items():
        for said in (answer, rf"\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"```json\n{answer}\n```"):
            verdict = environment.score(said, task)
            assert_verdict(verdict)
            assert verdict.outcome not in ("timeout", "error"), (name, verdict)


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
