"""What holds for every verifier that ships: there is a verdict, whatever a response says and whoever wrote the task."""

import functools
import importlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.registry import builtin_environments
from rollgym.envs.verifiers.base import Verdict, VerifierEnv
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
    found = {}
    for env_id, spec in builtin_environments().items():
        module, _, name = spec.entry_point.partition(":")
        env_class = getattr(importlib.import_module(module), name)
        if env_class.metadata.get("kind") == "stateless":
            found[env_id] = env_class
    return found


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
