"""No cheat is paid for more than what it happens to answer right; honest programs are paid in full."""

from itertools import cycle

import pytest

from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from tests.support.code_cheats import FUNCTION_CHEATS, HONEST_FUNCTIONS, PROGRAM_CHEATS
from tests.support.code_items import CASES, FUNCTION_ITEMS, HONEST_PROGRAM, PROGRAM_ITEMS
from tests.support.sandboxes import working_sandbox

# What a constant, or one place in an order, is right for by chance. All forms meet all cheats in
# benchmarks/conformance/code_cheats.py; here each form meets some.
BY_CHANCE = 2 / len(CASES)
SLOW = {
    *("endless", "sleeps", "ignores its limits", "stops the parent", "fork bomb", "takes all memory"),
    *("stack overflow", "huge result", "huge text", "huge number", "deep result", "reading files", "flood"),
}
FUNCTIONS = [
    (form, name)
    for form, name in zip(
        cycle(FUNCTION_ITEMS), (name for name in FUNCTION_CHEATS if name not in SLOW), strict=False
    )
]
EVERYWHERE = ("exit in the call", "always equal")
ENVIRONMENT = CodeTestsEnv(seconds=2)


@pytest.fixture(autouse=True)
def sandbox():
    working_sandbox()


def fenced(code):
    return f"<think>```python\nprint(0)\n```</think>Here it is:\n```python\n{code}```\n"


def assert_unpaid(verdict):
    assert verdict.outcome in ("wrong", "partial"), verdict
    assert verdict.score <= BY_CHANCE, verdict


@pytest.mark.parametrize(("form", "name"), FUNCTIONS)
def test_a_function_that_cheats(form, name):
    assert_unpaid(ENVIRONMENT.score(fenced(FUNCTION_CHEATS[name]), FUNCTION_ITEMS[form]()))


@pytest.mark.parametrize("form", FUNCTION_ITEMS)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_cheat_that_most_graders_pay_for(form, name):
    assert_unpaid(ENVIRONMENT.score(fenced(FUNCTION_CHEATS[name]), FUNCTION_ITEMS[form]()))


@pytest.mark.parametrize("name", [name for name in PROGRAM_CHEATS if name not in SLOW])
def test_a_program_that_cheats(name):
    assert_unpaid(ENVIRONMENT.score(fenced(PROGRAM_CHEATS[name]), PROGRAM_ITEMS["code_contests"]()))


def test_an_endless_program_is_wrong_and_no_fault_of_ours():
    quick = CodeTestsEnv(seconds=0.2)
    verdict = quick.score(fenced(FUNCTION_CHEATS["ignores its limits"]), FUNCTION_ITEMS["apps"]())
    assert (verdict.score, verdict.outcome) == (0.0, "wrong")
    assert "time" in verdict.detail


@pytest.mark.parametrize("form", FUNCTION_ITEMS)
def test_an_honest_and_noisy_function_is_paid_in_every_form(form):
    verdict = ENVIRONMENT.score(fenced(HONEST_FUNCTIONS["noisy"]), FUNCTION_ITEMS[form]())
    assert (verdict.score, verdict.outcome) == (1.0, "correct"), verdict


@pytest.mark.parametrize("name", [name for name in HONEST_FUNCTIONS if name != "noisy"])
def test_an_honest_function_is_paid(name):
    form = "kod_code_run" if name == "catches everything" else "apps"
    verdict = ENVIRONMENT.score(fenced(HONEST_FUNCTIONS[name]), FUNCTION_ITEMS[form]())
    assert (verdict.score, verdict.outcome) == (1.0, "correct"), verdict


@pytest.mark.parametrize("form", PROGRAM_ITEMS)
def test_an_honest_program_is_paid(form):
    verdict = ENVIRONMENT.score(fenced(HONEST_PROGRAM), PROGRAM_ITEMS[form]())
    assert (verdict.score, verdict.outcome) == (1.0, "correct"), verdict
