"""What a program may raise or answer so that the tests' own loops and comparisons end early, or hold for nothing."""

import math

import pytest

from rollgym.envs.code import conversation
from rollgym.envs.code.answers import NOT_RUN
from rollgym.envs.code.forms import read_item
from rollgym.envs.code.grader import Grader
from rollgym.envs.code.sandboxes import GradingLimits
from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from tests.support.sandboxes import working_sandbox

ENVIRONMENT = CodeTestsEnv(seconds=2)
LOOPS = """
from functools import partial
from itertools import starmap
import pytest
from solution import f

@pytest.mark.parametrize("f", [partial(f, {name!r})])
def test_{name}_all(f):
    assert all(map(f, [1, 2, 3]))

@pytest.mark.parametrize("f", [partial(f, {name!r})])
def test_{name}_filter(f):
    assert not list(filter(f, [1, 2, 3]))[3:]
    assert len(list(map(f, [1, 2]))) in (0, 2)
    assert set(starmap(f, [(1,), (2,)])) <= {{True}}

@pytest.mark.parametrize("f", [partial(f, {name!r})])
def test_{name}_sentinel(f):
    assert list(iter(lambda: f(1), True)) == []

@pytest.mark.parametrize("f", [partial(f, {name!r})])
def test_{name}_zip(f):
    for one, two in zip([1, 2], map(f, [1, 2])):
        assert two is True
"""
ENDINGS = (
    *("StopIteration", "StopAsyncIteration", "Own", "GeneratorExit", "KeyboardInterrupt", "SystemExit"),
    *("RecursionError", "IndexError", "AssertionError"),
)


@pytest.fixture(autouse=True)
def sandbox():
    return working_sandbox()


def fenced(code):
    return f"```python\n{code}\n```"


def score(code, test, **fields):
    return ENVIRONMENT.score(fenced(code), {"question": "x", "test": test, **fields})


def test_no_exception_of_a_program_ends_a_loop_of_its_tests():
    code = "class Own(StopIteration): pass\ndef f(name, n):\n    raise eval(name)\n"
    verdict = score(code, "\n".join(LOOPS.format(name=name) for name in ENDINGS))
    assert (verdict.score, verdict.outcome) == (0.0, "wrong"), verdict


def test_an_exception_in_the_middle_of_a_loop_does_not_end_it_either():
    code = "def f(name, n):\n    if n > 1: raise StopIteration\n    return True\n"
    assert score(code, LOOPS.format(name="middle")).detail.startswith("1 of 4 tests passed")


def test_the_loops_pay_an_honest_program():
    assert score("def f(name, n): return True\n", LOOPS.format(name="none")).outcome == "correct"


EXPECTED = """
import contextlib
import unittest
import pytest
from solution import Ended, Numbers, f

def test_raises():
    with pytest.raises(StopIteration):
        f()
    with pytest.raises((KeyError, StopIteration)):
        f()
    with pytest.raises(Ended):
        f(True)

def test_try():
    try:
        f()
    except StopIteration as end:
        assert str(end) == "over"
    else:
        assert False

class TestIt(unittest.TestCase):
    def test_it(self):
        self.assertRaises(StopIteration, f)
        with contextlib.suppress(StopIteration):
            f()
            assert False

def test_an_iterator_of_the_program():
    numbers = Numbers()
    assert next(numbers) == 1
    assert next(numbers, None) is None
    with pytest.raises(StopIteration):
        next(numbers)
"""


def test_an_end_that_tests_expect_is_seen_where_they_name_it():
    code = (
        "class Ended(StopIteration): pass\n"
        "def f(own=False): raise (Ended if own else StopIteration)('over')\n"
        "class Numbers:\n    left = 1\n    def __iter__(self): return self\n    def __next__(self):\n"
        "        if not self.left: raise StopIteration\n        self.left -= 1\n        return 1\n"
    )
    verdict = score(code, EXPECTED, solution=code)
    assert verdict.detail == "4 of 4 tests passed"
    silent = code.replace("raise (Ended if own else StopIteration)('over')", "return None")
    assert score(silent, EXPECTED, solution=code).detail.startswith("1 of 4 tests passed")


NAN_TESTS = """
def test_{name}_in_a_loop():
    assert not any(x > 3 or x < 3 for x in f({name!r}))

def test_{name}_unequal():
    assert f({name!r}) != 3
"""
NAN_CHANGED = """
def test_changed():
    given = [2, 1]
    f(given)
    assert not any(one > two for one, two in zip(given, given[1:]))
"""
NANS = {
    "iterator": "iter([math.nan])",
    "generator": "(math.nan for _ in range(2))",
    "nested": "[[(math.nan,)]]",
    "keys": "{math.nan: 1}",
    "complex": "[complex(0, math.nan)]",
    "decimal": "[decimal.Decimal('sNaN')]",
    "deque": "collections.deque([math.nan])",
    "view": "{1: math.nan}.values()",
    "numpy": "Fake()",
    "itself": "math.nan",
}


def test_a_number_that_is_none_passes_nowhere():
    code = (
        "import collections, decimal, math\nclass Fake:\n    __module__ = 'numpy'\n"
        "    def tolist(self): return [math.nan]\n"
        "def f(n):\n    if isinstance(n, list): n[:] = [math.nan] * 2\n    else: return eval(NANS[n])\n"
        f"NANS = {NANS!r}\n"
    )
    tests = "".join(NAN_TESTS.format(name=name) for name in NANS)
    verdict = score(code, f"from solution import f\n{tests}{NAN_CHANGED}")
    assert (verdict.score, verdict.outcome) == (0.0, "wrong"), verdict


def test_a_word_that_holds_nan_is_no_mention_of_it():
    test = "from solution import f\ndef test_it():\n    banana = 3\n    assert f(0) != banana\n"
    assert score("def f(n): return float('nan')\n", test).score == 0.0
    mentioned = "import math\nfrom solution import f\ndef test_it():\n    assert math.isnan(f(0))\n"
    assert score("def f(n): return float('nan')\n", mentioned).score == 1.0


@pytest.mark.parametrize(
    ("test", "answers"),
    [("abs(f(1) - 5) < 1", {"5": 1.0, "6": 0.0}), ("abs(f(1) - 5) <= 1", {"5": 1.0, "6": 1.0, "7": 0.0})],
)
def test_less_is_not_less_or_equal(test, answers):
    for answer, expected in answers.items():
        verdict = ENVIRONMENT.score(
            fenced(f"def f(n): return {answer}"), {"prompt": "x", "test_list": [f"assert {test}"]}
        )
        assert verdict.score == expected, (answer, verdict)


@pytest.mark.parametrize("answer", ["5 + 1e-12", "5.0000000000000009", "4.999999999999999", "True"])
@pytest.mark.parametrize("form", ["apps", "eval_plus"])
def test_a_whole_number_takes_no_rounding_error(form, answer):
    items = {
        "apps": {"question": "x", "input_output": {"fn_name": "f", "inputs": [[1]], "outputs": [[[5]]]}},
        "eval_plus": {
            **{"prompt": "def f(n):\n", "entry_point": "f", "base_input": [[1]], "atol": 1e-6},
            "canonical_solution": "    return [5]\n",
        },
    }
    assert ENVIRONMENT.score(fenced(f"def f(n): return [{answer}]"), items[form]).score == 0.0
    assert ENVIRONMENT.score(fenced("def f(n): return [5]"), items[form]).score == 1.0


# -- what hangs --------------------------------------------------------------------------------------------------

HANGING = {
    "calls": (
        {
            "question": "x",
            "input_output": {"fn_name": "f", "inputs": [[n] for n in range(6)], "outputs": [0] * 6},
        },
        "def f(n):\n    while True: pass\n",
    ),
    "programs": (
        {"question": "x", "input_output": {"inputs": ["1"] * 6, "outputs": ["0"] * 6}},
        "import time\ntime.sleep(1000)\n",
    ),
    "cases": (
        {"prompt": "x", "test_list": [f"assert (f({n}), 1) == (0, 1)" for n in range(6)]},
        "import time\ndef f(n):\n    time.sleep(1000)\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", HANGING)
def test_a_program_that_hangs_costs_the_time_of_few_tests(form, sandbox):
    fields, code = HANGING[form]
    item = read_item(fields)
    limits = GradingLimits(seconds=0.2, hurried_seconds=0.05)
    checked = Grader(sandbox, limits).grade(item, code)
    assert [each.late for each in checked].count(True) == limits.patience
    stopped = Grader(sandbox, limits).grade(item, code, to_first_failure=True)
    assert sorted(each.why == NOT_RUN for each in stopped) == [False, *[True] * 5]
    assert [each.late for each in stopped].count(True) == 1


def test_a_test_that_asks_in_a_loop_has_the_time_of_one_test(sandbox, monkeypatch):
    # A test has two seconds by the clock in any case.
    monkeypatch.setattr(conversation, "_MARGIN_SECONDS", -1.5)
    test = "from solution import f\ndef test_it():\n    while f(1):\n        pass\ndef test_next():\n    assert f(2)\n"
    limits = GradingLimits(seconds=0.1, total_seconds=20.0)
    checked = Grader(sandbox, limits).grade(read_item({"question": "x", "test": test}), "def f(n): return n")
    assert [(each.passed, each.late) for each in checked] == [(False, True), (True, False)]


def test_each_case_of_a_test_has_that_time(sandbox, monkeypatch):
    begun = []
    monkeypatch.setattr(
        conversation.SuiteConversation, "_until", lambda self, seconds: begun.append(seconds) or math.inf
    )
    test = (
        "import pytest\nfrom solution import f\n"
        "@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n    assert f(n) == n\n"
    )
    checked = Grader(sandbox, GradingLimits()).grade(
        read_item({"question": "x", "test": test}), "def f(n): return n"
    )
    assert [each.passed for each in checked] == [True]
    # At the beginning, after each case, and after the test.
    assert begun == [GradingLimits().wall_seconds] * 5


def test_what_the_system_ends_a_tick_early_ran_out_of_time_too(sandbox):
    """At whole seconds the system's own bound ends a program, at times before its clock says so much."""
    fields, code = HANGING["calls"]
    limits = GradingLimits(seconds=1.0, hurried_seconds=1.0)
    checked = Grader(sandbox, limits).grade(read_item(fields), code)
    assert [each.late for each in checked].count(True) == limits.patience
    assert not [each.why for each in checked if "signal" in each.why]


def test_what_ran_late_before_leaves_less_time(sandbox):
    fields, _ = HANGING["calls"]
    slow = "import time\ndef f(n):\n    time.sleep(0.5)\n    return 0\n"
    limits = GradingLimits(seconds=2.0, hurried_seconds=0.1)
    graded = {
        late: Grader(sandbox, limits).grade(read_item(fields), slow, range(2), late=late)[0].passed
        for late in (0, 1)
    }
    assert graded == {0: True, 1: False}


def test_all_or_nothing_stops_at_the_first_failure_of_any_kind():
    for fields, _ in HANGING.values():
        code = "def f(n): return 1\n" if "outputs" not in str(fields) else "def f(n): return 1\nprint(1)\n"
        verdict = CodeTestsEnv(scoring="all", seconds=2).score(fenced(code), fields)
        assert (verdict.outcome, verdict.detail) == (
            "wrong",
            verdict.detail,
        )
        assert verdict.detail.startswith("0 of 6 tests passed, and the next failed"), verdict
