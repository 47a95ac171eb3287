"""Grading, apart from cheats: what tests can do, and what is our fault."""

import json

import pytest

from rollgym.envs.code.forms import read_item
from rollgym.envs.code.grader import Grader
from rollgym.envs.code.sandboxes import GradingLimits
from rollgym.envs.verifiers.code_tests import CodeTestsEnv
from rollgym.sandbox.core.base import Outcome, RunResult
from tests.support.sandboxes import working_sandbox

ENVIRONMENT = CodeTestsEnv(seconds=2)

LIBRARY = """
import functools
LIMIT = 7
class BadInput(ValueError): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self):
        if not self.items: raise IndexError("stack is empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
def apply(function, numbers): return [function(number) for number in numbers]
def total(numbers):
    if numbers is None: raise BadInput("none given")
    return sum(numbers)
def put_in_order(numbers): numbers.sort()
@functools.total_ordering
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __rmul__(self, number): return Vector(number * self.x, number * self.y)
    def __eq__(self, other): return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)
    def __lt__(self, other): return self.x < other.x
    def __repr__(self): return f"Vector({self.x}, {self.y})"
def adder(number): return lambda other: number + other
async def later(number): return number + 1
"""
LIBRARY_TEST = """
import asyncio
import pytest
from solution import BadInput, LIMIT, Stack, Vector, adder, apply, later, put_in_order, total

@pytest.fixture
def stack():
    made = Stack()
    made.push(1)
    return made

def test_objects(stack):
    stack.push([2])
    assert len(stack) == 2 and stack.pop() == [2]
    assert stack.items == [1]
    with pytest.raises(IndexError, match="empty"):
        stack.pop()
        stack.pop()

def test_functions_of_the_tests_are_called():
    assert apply(lambda number: number * 2, [1, 2]) == [2, 4]
    assert apply(str, [1]) == ["1"]

@pytest.mark.parametrize("numbers,expected", [([1, 2], 3), ([], 0)])
def test_cases(numbers, expected):
    assert total(numbers) == expected

def test_errors():
    with pytest.raises(BadInput):
        total(None)
    try:
        total(None)
    except ValueError as error:
        assert "none" in str(error)

def test_nearness():
    assert total([0.1, 0.2]) == pytest.approx(0.3)
    assert LIMIT == 7

def test_arguments_are_changed():
    numbers = [3, 1]
    put_in_order(numbers)
    assert numbers == [1, 3]

def test_operators():
    assert Vector(1, 2) + Vector(1, 1) == Vector(2, 3)
    assert 2 * Vector(1, 2) == Vector(2, 4)
    assert Vector(1, 2) != Vector(2, 1)
    assert isinstance(Vector(1, 1), Vector)
    assert sorted([Vector(3, 1), Vector(1, 1)])[0].x == 1
    assert repr(Vector(1, 2)) == "Vector(1, 2)"

def test_what_is_returned_can_be_called():
    assert adder(2)(3) == 5
    assert asyncio.run(later(1)) == 2

def test_what_is_awaited():
    async def both():
        return await later(1), await asyncio.gather(later(2), later(3))
    assert asyncio.run(both()) == (2, [3, 4])

class TestMore:
    def test_method(self):
        assert total([1]) == 1
"""


@pytest.fixture(scope="module", autouse=True)
def grader():
    return Grader(working_sandbox(), GradingLimits(seconds=2))


def fenced(code):
    return f"```python\n{code}\n```"


def score(code, **fields):
    return ENVIRONMENT.score(fenced(code), {"prompt": "", **fields})


def library(code):
    return ENVIRONMENT.score(fenced(code), {"question": "x", "test": LIBRARY_TEST, "solution": LIBRARY})


def test_a_test_file_with_classes_errors_and_callbacks():
    verdict = library(LIBRARY)
    assert (verdict.score, verdict.detail) == (1.0, "10 of 10 tests passed")


def test_each_test_of_a_file_fails_by_itself(grader):
    broken = LIBRARY.replace("numbers.sort()", "numbers.sort(reverse=True)").replace(
        "return sum(", "return 1 + sum("
    )
    item = read_item({"question": "x", "test": LIBRARY_TEST, "solution": LIBRARY})
    passed = [checked.passed for checked in grader.grade(item, broken)]
    assert passed == [True, True, False, True, False, False, True, True, True, False]


CALLED = "def check(candidate):\n    assert candidate(7) == 14\n"
LOOPED = "def check(candidate):\n    for n in (7, 8):\n        assert candidate(n) == 2 * n\n"
TRUE = "def check(candidate):\n    for n in (7, 8):\n        assert candidate(n)\n"


@pytest.mark.parametrize("test", [CALLED, LOOPED, TRUE])
def test_a_coroutine_that_nobody_awaits_is_no_answer(test):
    item = {"prompt": "def twice(n):\n", "entry_point": "twice", "test": test}
    plain = "def twice(n):\n    return 2 * n\n"
    assert ENVIRONMENT.score(fenced(plain), item).outcome == "correct"
    verdict = ENVIRONMENT.score(fenced(f"async {plain}"), item)
    assert (verdict.score, verdict.outcome) == (0.0, "wrong")


@pytest.mark.parametrize("begin", ["assert f([]) == 0", "for n in ([], [0]):\n    assert f(n) == 0"])
def test_a_truth_value_is_equal_to_what_python_says(begin):
    verdict = score("def f(numbers):\n    return sum(numbers) or False", test_list=[begin])
    assert verdict.outcome == "correct", verdict
    assert score("def f(numbers):\n    return True", test_list=[begin]).outcome == "wrong"


def test_numbers_may_have_as_many_digits_as_they_have():
    code = "def f(n):\n    return str(2 ** n)"
    tests = ["assert len(f(20000)) == 6021", "for n in (20000, 20001):\n    assert int(f(n)) == 2 ** n"]
    assert score(code, test_list=tests).detail == "2 of 2 tests passed"
    streams = {"inputs": ["20000"], "outputs": ["6021"]}
    printed = ENVIRONMENT.score(
        fenced("print(len(str(2 ** int(input()))))"), {"question": "x", "input_output": json.dumps(streams)}
    )
    assert printed.outcome == "correct", printed


def test_an_object_that_is_equal_to_everything_is_equal_to_nothing(grader):
    equal = "return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)"
    item = read_item({"question": "x", "test": LIBRARY_TEST, "solution": LIBRARY})
    assert not grader.grade(item, LIBRARY.replace(equal, "return True"))[6].passed


def test_a_function_that_is_made_a_class_is_no_class():
    test = "from solution import total\ndef test_it():\n    for n in (1, 2):\n        assert abs(total([n]) - n) < 1\n"
    cheat = "class total:\n    def __init__(self, n): pass\n    def __sub__(self, other): return 0\n"
    for solution in ({"solution": "def total(n): return sum(n)"}, {}):
        verdict = ENVIRONMENT.score(fenced(cheat), {"question": "x", "test": test, **solution})
        assert (verdict.score, verdict.outcome) == (0.0, "wrong")


def test_answers_in_an_unknown_form_are_the_program_s_own_fault():
    forged = (
        "{}",
        "3",
        '{"dict": []}',
        '{"class": 3}',
        '{"dict": [["class", 3], ["error", true]]}',
        '{"raised": []}',
    )
    for reply in forged:
        code = f"import json\njson.dumps = lambda *a, **k: {reply!r}\ndef total(n): return 1\nclass Stack: pass\n"
        test = "from solution import Stack, total\ndef test_it():\n    n = total([1])\n    assert n == 1 and Stack()\n"
        verdict = ENVIRONMENT.score(fenced(code), {"question": "x", "test": test})
        assert (verdict.score, verdict.outcome) == (0.0, "wrong"), (reply, verdict)


def test_what_is_expected_is_worked_out_without_the_program():
    tests = [
        "assert f(x=2, *[1]) == sorted([3, 1])[::-1]",
        "import math\nassert f(1, math.floor(2.5)) == helper(1)",
        "assert not f(*'ab')",
    ]
    setup = "def helper(n):\n    return [3, n]\n"
    code = "def helper(n):\n    return 0\ndef f(a, x):\n    return [] if a == 'a' else [3, 1]"
    assert score(code, test_list=tests, test_setup_code=setup).detail == "3 of 3 tests passed"


def test_helpers_of_the_prompt_are_not_those_of_the_program():
    item = {
        "prompt": "def double(n):\n    return 2 * n\n\ndef half(n):\n    ''' Undo double. '''\n",
        "entry_point": "half",
        "test": "def check(candidate):\n    for n in range(3, 6):\n        assert candidate(double(n)) == n\n",
    }
    assert ENVIRONMENT.score(fenced("def half(n):\n    return n // 2\n"), item).outcome == "correct"
    cheat = "def double(n):\n    return n\ndef half(n):\n    return n\n"
    assert ENVIRONMENT.score(fenced(cheat), item).score == 0.0
    assert ENVIRONMENT.score("    return n // 2\n", item).outcome == "correct"
    assert ENVIRONMENT.score("I do not know.", item).outcome == "unparsable"


def test_a_prompt_need_not_be_a_program_by_itself():
    item = {
        "prompt": "import math\n\ndef root(n):\n",
        "entry_point": "root",
        "test": "def check(candidate):\n    assert candidate(9) == 3\n    assert root(16) == 4\n",
    }
    for code in ("def root(n):\n    return math.isqrt(n)\n", "    return math.isqrt(n)\n"):
        assert ENVIRONMENT.score(fenced(code), item).detail == "2 of 2 tests passed"


def test_a_method_of_a_solution_class_and_the_names_it_needs():
    code = "class Solution:\n    def f(self, n: List[int]) -> int:\n        return Counter(n)[1]"
    tests = {"fn_name": "f", "inputs": [[[1, 1]], [[2]]], "outputs": [2, 0]}
    assert score(code, question="x", input_output=json.dumps(tests)).outcome == "correct"


def test_a_program_may_end_itself_and_its_threads_are_waited_for():
    code = (
        "import sys, threading, time\ndef main():\n    time.sleep(0.05)\n    print(input()[::-1])\n"
        "if __name__ == '__main__':\n    threading.Thread(target=main).start()\n    sys.exit()\n"
    )
    tests = {"inputs": ["ab\n", "xyz"], "outputs": ["ba", "zyx\n"]}
    assert score(code, question="x", input_output=tests).outcome == "correct"


def test_other_ways_to_write_a_test_file():
    test = """
import unittest
import solution
from solution import *

class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack()
    def test_push(self):
        self.stack.push(1)
        self.assertEqual(len(self.stack), 1)
        with self.assertRaises(IndexError):
            self.stack.pop(), self.stack.pop()
    def test_total(self):
        self.assertAlmostEqual(solution.total([0.1, 0.2]), 0.3)

def test_star():
    assert total([1, 2]) == 3
"""
    verdict = ENVIRONMENT.score(fenced(LIBRARY), {"question": "x", "test": test, "solution": LIBRARY})
    assert verdict.detail == "3 of 3 tests passed"
    broken = LIBRARY.replace("self.items.append(x)", "pass")
    verdict = ENVIRONMENT.score(fenced(broken), {"question": "x", "test": test, "solution": LIBRARY})
    assert verdict.detail.startswith("2 of 3 tests passed")


@pytest.mark.parametrize(
    "reading",
    [
        "open('/dev/stdin').read()",
        "os.read(0, 100).decode()",
        "sys.stdin.buffer.read().decode()",
        "open(0).read()",
    ],
)
def test_a_program_may_read_its_input_by_any_name(reading):
    code = f"import os, sys\nprint({reading}[::-1])\n"
    assert score(code, question="x", input_output={"inputs": ["ab"], "outputs": ["ba"]}).outcome == "correct"


def test_scoring_all_or_nothing():
    tests = ["assert f(1) == 1", "assert f(2) == 3"]
    fields = {"prompt": "x", "test_list": tests}
    response = fenced("def f(x): return x")
    assert CodeTestsEnv().score(response, fields).score == 0.5
    verdict = CodeTestsEnv(scoring="all").score(response, fields)
    assert (verdict.score, verdict.outcome) == (0.0, "wrong")
    assert CodeTestsEnv(max_tests=1).score(response, fields).outcome == "correct"


def test_c_plus_plus():
    code = (
        "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }\n"
    )
    tests = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    item = {"question": "x", "input_output": tests, "language": "cpp"}
    verdict = ENVIRONMENT.score(f"```cpp\n{code}```", item)
    if "g++" in verdict.detail:
        pytest.skip(verdict.detail)
    assert verdict.outcome == "correct"
    assert ENVIRONMENT.score("```cpp\nint main( {\n```", item).outcome == "wrong"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {
                "question": "x",
                "test": "import nothing_like_it\nfrom solution import f\ndef test_it():\n    f()",
            },
            "nothing",
        ),
        ({"question": "x", "test": "from solution import f\ndef test_it(capsys):\n    f()"}, "capsys"),
        (
            {
                "prompt": "def f(n):\n",
                "entry_point": "f",
                "canonical_solution": "    1/0",
                "base_input": [[1]],
            },
            "fails",
        ),
        ({"nothing": 1}, "no known form"),
    ],
)
def test_an_item_that_cannot_be_used_is_no_fault_of_the_program(fields, said):
    verdict = ENVIRONMENT.score(fenced("def f(*n): return 1"), fields)
    assert (verdict.score, verdict.outcome) == (0.0, "error")
    assert said in verdict.detail


@pytest.mark.parametrize(
    ("test", "code"),
    [
        (
            "from solution import f\nFIRST = f(1)[0]\ndef test_it():\n    assert FIRST == 1\n",
            "def f(n): return []",
        ),
        (
            "from solution import f\ndef test_it():\n    assert f(lambda n: memoryview(n)) == 1\n",
            "def f(g): return g(b'x')",
        ),
        (
            "from solution import f\nfor n in f(3): pass\ndef test_it():\n    assert f(1) == 1\n",
            "def f(n): return 1",
        ),
        (
            "from solution import f\nclass Box: pass\ndef test_it():\n    found = f(1)\n    found.append(Box())\n"
            "    assert len(found) == 2\n",
            "class Kept:\n    def append(self, part): pass\n    def __len__(self): return 2\n"
            "def f(n): return Kept()",
        ),
    ],
)
def test_a_program_cannot_make_its_item_unusable(test, code):
    verdict = ENVIRONMENT.score(fenced(code), {"question": "x", "test": test})
    assert (verdict.score, verdict.outcome) == (0.0, "wrong"), verdict


def test_what_an_object_of_the_item_cannot_be_given_is_still_no_fault_of_the_program():
    test = "from solution import Stack\nclass Box: pass\ndef test_it():\n    stack = Stack()\n    stack.push(Box())\n"
    code = "class Stack:\n    def push(self, part): pass\n"
    verdict = ENVIRONMENT.score(fenced(code), {"question": "x", "test": test, "solution": code})
    assert (verdict.score, verdict.outcome) == (0.0, "error")
    assert "no plain value" in verdict.detail


def test_exceptions_that_are_made_of_more_than_a_text_are_raised_all_the_same():
    test = (
        "import pytest\nfrom solution import read, Worse\n"
        "def test_reading():\n    with pytest.raises(UnicodeDecodeError, match='utf-8'):\n        read(b'\\xff')\n"
        "def test_worse():\n    with pytest.raises(Worse):\n        read(b'')\n"
        "def test_either():\n    with pytest.raises(ValueError):\n        read(b'\\xff')\n"
    )
    code = (
        "class Worse(UnicodeDecodeError):\n    pass\n"
        "def read(data):\n    if not data:\n        raise Worse('utf-8', b'', 0, 1, 'empty')\n"
        "    return data.decode('utf-8')\n"
    )
    verdict = ENVIRONMENT.score(fenced(code), {"question": "x", "test": test, "solution": code})
    assert (verdict.score, verdict.outcome) == (1.0, "correct"), verdict


HALF = "def f(n): raise ValueError(chr(0xD800))"
HALF_NAME = """
import os
def f(n):
    for descriptor in range(3, 4096):
        try:
            os.write(descriptor, b'{"raised": ["\\ud800"], "text": "\\ud800"}\\n')
        except OSError:
            pass
"""


@pytest.mark.parametrize("code", [HALF, HALF_NAME, "raise ValueError(chr(0xD800))"])
@pytest.mark.parametrize(
    "fields",
    [
        {"test": "from solution import f\ndef test_it():\n    assert f(1) == 1\n"},
        {"inputs": [[1], [2]], "outputs": [1, 2], "fn_name": "f"},
    ],
)
def test_half_a_character_that_a_program_says_can_be_told(code, fields):
    verdict = ENVIRONMENT.score(fenced(code), {"question": "x", **fields})
    assert (verdict.score, verdict.outcome) == (0.0, "wrong")
    # What cannot be encoded would end the step of a server with an error in the place of this score.
    assert verdict.detail.encode()


class BrokenSandbox:
    """What every run comes back with where the machine is at fault."""

    name = "broken"

    def __init__(self, result):
        self._result = result

    def run(self, program, **options):
        return self._result


@pytest.mark.parametrize(
    "result",
    [
        RunResult(outcome=Outcome.SANDBOX_ERROR, detail="no memory for namespaces"),
        RunResult(outcome=Outcome.NON_ZERO_EXIT, exit_code=127, stderr=b"python3: not found"),
    ],
)
def test_a_sandbox_that_fails_is_our_fault(result, monkeypatch):
    monkeypatch.setattr("rollgym.envs.verifiers.code_tests.operator_sandbox", lambda: BrokenSandbox(result))
    verdict = CodeTestsEnv().score(
        fenced("def f(x): return 1"), {"prompt": "x", "test_list": ["assert f(1) == 1"]}
    )
    assert (verdict.score, verdict.outcome) == (0.0, "error")
    assert "no memory" in verdict.detail or "not found" in verdict.detail
