"""Tests that would be passed by whatever is written, or by nothing: such an item is an error, whatever the program."""

import pytest

from rollgym.envs.code.forms import read_item
from rollgym.envs.code.item import ItemError
from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from tests.support.sandboxes import working_sandbox

HEAD = "import asyncio\nimport unittest\nimport pytest\nfrom solution import f\n"
SOUND = "def test_sound():\n    assert f(1) == 1\n"


def kod_code(test):
    return {"question": "x", "test": f"{HEAD}{SOUND}{test}"}


def checked(body):
    return {"prompt": "", "entry_point": "f", "test": f"def check(candidate):\n    {body}\n"}


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("async def test_it():\n    assert f(1) == 2\n", "coroutine"),
        ("@pytest.mark.skip(reason='later')\ndef test_it():\n    assert f(1) == 2\n", "marked as skip"),
        ("@pytest.mark.xfail\ndef test_it():\n    assert f(1) == 2\n", "marked as xfail"),
        (
            "class TestIt(unittest.TestCase):\n    @unittest.expectedFailure\n    def test_it(self): f(1)\n",
            "marked as expectedFailure",
        ),
        (
            "@unittest.skip('later')\nclass TestIt:\n    def test_it(self): assert f(1) == 2\n",
            "marked as skip",
        ),
        ("class TestIt:\n    async def test_it(self):\n        assert f(1) == 2\n", "coroutine"),
        (
            "class TestIt(unittest.IsolatedAsyncioTestCase):\n    async def test_it(self):\n        assert f(1)\n",
            "coroutine",
        ),
        ("def test_it():\n    pass\n", "nothing about the program"),
        ("def test_it():\n    ...\n", "nothing about the program"),
        ("def test_it():\n    assert True\n", "nothing about the program"),
        ("def test_it():\n    x = 3\n    assert x == 3\n", "nothing about the program"),
        ("class TestIt:\n    def test_it(self):\n        assert 1 == 1\n", "nothing about the program"),
        ("def test_it():\n    assert f(1) == 2\n    yield\n", "generator"),
        ("if True:\n    def test_it():\n        assert f(1) == 2\n", "within another statement"),
        (
            "try:\n    class TestIt:\n        def test_it(self): assert f(1)\nexcept E: pass\n",
            "within another",
        ),
        ("class TestIt:\n    if True:\n        def test_it(self): assert f(1)\n", "within another statement"),
        ("test_it = lambda: f(1) == 2\n", "no definition"),
        ("def test_sound():\n    assert f(2) == 2\n", "two tests are named test_sound"),
        (
            "class TestIt:\n    def __init__(self): pass\n    def test_it(self): assert f(1) == 1\n",
            "__init__",
        ),
        (
            "class TestOne:\n    def test_it(self): assert f(1)\nclass TestTwo(TestOne):\n    def test_b(self): f(1)\n",
            "inherits",
        ),
    ],
)
def test_a_test_that_would_vanish_or_says_nothing(test, said):
    with pytest.raises(ItemError, match=said):
        read_item(kod_code(test))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "x", "test_list": ["assert f(1) == 1", "assert True"]}, r"test_list\[1\]"),
        ({"prompt": "x", "test_list": ["assert f(1) == 1", ""]}, r"test_list\[1\]"),
        ({"prompt": "x", "test_list": ["assert 1 == 1"]}, r"test_list\[0\]"),
        (checked("assert True"), "no tests"),
        (checked("pass"), "no tests"),
        (checked("def inner():\n        assert candidate(1) == 2"), "never run"),
        (
            checked("async def inner():\n        assert candidate(1) == 2\n    assert candidate(1)"),
            "never run",
        ),
        (
            {
                "prompt": "",
                "entry_point": "f",
                "test": "async def check(candidate):\n    assert candidate(1)\n",
            },
            "no function check",
        ),
    ],
)
def test_an_assertion_that_is_never_made_or_always_holds(fields, said):
    with pytest.raises(ItemError, match=said):
        read_item(fields)


SOUND_TESTS = """
RESULT = f(3)

def inner(n):
    assert f(n) == n

@pytest.fixture
def made():
    return f(3)

class Helper:
    def go(self): return f(3)

class TestData:
    def __init__(self): self.n = 3

def test_a_helper():
    inner(2)

def test_a_fixture(made):
    assert made == 3

class TestClass:
    def setup_method(self):
        self.made = f(3)
    def test_it(self):
        assert self.made == 3

def test_a_value():
    assert RESULT == 3

def test_a_module():
    import solution
    assert solution.f(3) == 3

def test_a_name():
    import importlib
    assert importlib.import_module("solution").f(3) == 3

def test_a_coroutine():
    async def go():
        assert f(3) == 3
    asyncio.run(go())

def test_an_object():
    assert Helper().go() == 3

def test_data():
    assert f(TestData().n) == 3
"""
SILENT_TESTS = (
    "def test_it():\n    def inner():\n        assert f(1) == 2\n",
    "def test_it():\n    async def inner():\n        assert f(1) == 2\n    inner()\n",
    "def test_it():\n    return\n    assert f(1) == 2\n",
    "def test_it():\n    for n in ():\n        assert f(n) == 2\n",
    "def test_it():\n    if False:\n        assert f(1) == 2\n",
    "@pytest.mark.parametrize('n', [])\ndef test_it(n):\n    assert f(n) == 2\n",
    "def test_it():\n    f\n",
)


def test_tests_that_come_to_the_program_by_others_are_sound():
    working_sandbox()
    right, wrong = (
        CodeTestsEnv(seconds=2).score(f"```python\n{code}```", kod_code(SOUND_TESTS))
        for code in ("def f(n): return n\n", "def f(n): return 1\n")
    )
    assert (right.outcome, wrong.detail[:7]) == ("correct", "1 of 10"), (right, wrong)


@pytest.mark.parametrize("test", SILENT_TESTS)
def test_a_test_that_asks_nothing_of_the_program_is_found_when_it_runs(test):
    working_sandbox()
    verdict = CodeTestsEnv(seconds=2).score("```python\ndef f(n): raise SystemExit\n```", kod_code(test))
    assert (verdict.score, verdict.outcome) == (0.0, "error"), verdict
    assert "asks nothing of the program" in verdict.detail


def test_tests_in_a_function_within_a_check_are_run_where_it_is_called():
    working_sandbox()
    item = checked("def inner(n):\n        assert candidate(n) == n\n    inner(1)\n    inner(2)")
    verdicts = [
        CodeTestsEnv(seconds=2).score(f"```python\ndef f(n): return {value}\n```", item)
        for value in ("n", "1", "0")
    ]
    assert [verdict.detail[:6] for verdict in verdicts] == ["2 of 2", "1 of 2", "0 of 2"]


MISSING = "def test_it():\n    with pytest.warns(UserWarning):\n        assert f(1) == 1\n"
SKIPPED = "def test_it():\n    pytest.skip('later')\n    for n in (1, 2):\n        assert f(n) == n\n"


@pytest.mark.parametrize(("test", "said"), [(MISSING, "pytest.warns"), (SKIPPED, "a test is skipped")])
def test_what_cannot_be_run_here_or_is_skipped_is_no_fault_of_a_right_program(test, said):
    working_sandbox()
    verdict = CodeTestsEnv(seconds=2).score("```python\ndef f(n): return n\n```", kod_code(test))
    assert (verdict.score, verdict.outcome) == (0.0, "error"), verdict
    assert said in verdict.detail


def test_a_program_that_brings_about_that_a_test_is_skipped_has_not_passed_it():
    working_sandbox()
    test = "def test_it():\n    if f(1) is None:\n        pytest.skip('nothing')\n    assert f(2) == 2\n"
    verdicts = [
        CodeTestsEnv(seconds=2).score(f"```python\ndef f(n): return {value}\n```", kod_code(test))
        for value in ("n", "None")
    ]
    assert [verdict.detail[:6] for verdict in verdicts] == ["2 of 2", "0 of 2"], verdicts


@pytest.mark.parametrize("setup", ["raise Exception", "import no_such_library", "raise SystemExit"])
def test_a_setup_that_fails_by_itself_is_the_items_error(setup):
    item = {"question": "x", "test_list": ["assert f(1) == 1"], "test_setup_code": setup}
    verdict = CodeTestsEnv(seconds=2).score("```python\ndef f(n): return n\n```", item)
    assert (verdict.score, verdict.outcome) == (0.0, "error")


def test_a_program_that_does_not_load_is_wrong_behind_a_sound_setup():
    item = {"question": "x", "test_list": ["assert f(1) == 1"], "test_setup_code": "import math"}
    verdict = CodeTestsEnv(seconds=2).score("```python\ndef f(n): return n\nraise Exception\n```", item)
    assert (verdict.score, verdict.outcome) == (0.0, "wrong")
