"""One problem in every form of an item: the largest of a list of whole numbers, or of the numbers of a line."""

import base64
import json
import pickle
import zlib
from typing import Any

HONEST = "def largest(numbers):\n    return max(numbers)\n"
HONEST_PROGRAM = "print(max(map(int, input().split())))\n"

# Hidden tests have answers of which none is right for all, and none can be told from the place of a test.
CASES: list[tuple[list[int], int]] = [
    ([3, 1, 2], 3),
    ([-5, -9], -5),
    ([1], 1),
    ([0, 17, 4], 17),
    ([8, 8], 8),
    ([2, 100, 99], 100),
]
_PROMPT = 'def largest(numbers):\n    """Return the largest of the numbers."""\n'
_QUESTION = "Write a function `largest(numbers)` that returns the largest of the numbers."


def human_eval() -> dict[str, Any]:
    asserts = "\n".join(f"    assert candidate({numbers}) == {answer}" for numbers, answer in CASES)
    return {
        "task_id": "Own/0",
        "prompt": _PROMPT,
        "entry_point": "largest",
        "canonical_solution": "    return max(numbers)\n",
        "test": f"METADATA = {{}}\n\ndef check(candidate):\n{asserts}\n",
    }


def human_eval_run() -> dict[str, Any]:
    """Tests that can only be run: loops, tolerances, helpers."""
    test = f"""
import math

def check(candidate):
    for numbers, answer in {CASES[:4]!r}:
        assert candidate(numbers) == answer
    result = candidate({CASES[4][0]})
    assert result == {CASES[4][1]}
    assert math.isclose(candidate({CASES[5][0]}), {CASES[5][1]}, abs_tol=1e-6)
    assert 0 <= abs(candidate({CASES[3][0]}) - {CASES[3][1]}) < 1e-6
    assert max(0.0, abs(candidate({CASES[1][0]}) - {CASES[1][1]})) < 1e-6
"""
    return {"prompt": _PROMPT, "entry_point": "largest", "test": test}


def eval_plus() -> dict[str, Any]:
    return {
        "prompt": _PROMPT,
        "entry_point": "largest",
        "canonical_solution": "    return max(numbers)\n",
        "base_input": [[numbers] for numbers, _ in CASES[:2]],
        "plus_input": [[numbers] for numbers, _ in CASES[2:]],
        "atol": 0,
    }


def mbpp() -> dict[str, Any]:
    return {
        "task_id": 1,
        "text": _QUESTION,
        "code": HONEST,
        "test_list": [f"assert largest({numbers}) == {answer}" for numbers, answer in CASES],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def mbpp_run() -> dict[str, Any]:
    """Assertions with something around the call."""
    tests = [f"assert (largest({numbers}), 1) == ({answer}, 1)" for numbers, answer in CASES[:3]]
    tests += [
        f"x = largest({numbers})\nassert x == {answer} and {answer} == x" for numbers, answer in CASES[3:]
    ]
    return {"prompt": _QUESTION, "test_list": tests}


def apps() -> dict[str, Any]:
    tests = {
        "fn_name": "largest",
        "inputs": [[numbers] for numbers, _ in CASES],
        "outputs": [answer for _, answer in CASES],
    }
    return {"question": _QUESTION, "input_output": json.dumps(tests), "solutions": json.dumps([HONEST])}


def live_code_bench() -> dict[str, Any]:
    cases = [
        {"input": json.dumps(numbers), "output": json.dumps(answer), "testtype": "functional"}
        for numbers, answer in CASES
    ]
    return {
        "question_content": _QUESTION,
        "starter_code": "class Solution:\n    def largest(self, numbers):\n        ",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": packed(cases[1:]),
        "metadata": json.dumps({"func_name": "largest"}),
    }


def kod_code() -> dict[str, Any]:
    functions = "\n".join(
        f"def test_{number}():\n    assert largest({numbers}) == {answer}\n"
        for number, (numbers, answer) in enumerate(CASES)
    )
    return {"question": _QUESTION, "solution": HONEST, "test": f"from solution import largest\n\n{functions}"}


def kod_code_run() -> dict[str, Any]:
    test = f"""
import pytest
from solution import largest

@pytest.mark.parametrize("numbers,answer", {CASES!r})
def test_each(numbers, answer):
    assert largest(numbers) == answer

def test_loop():
    for numbers, answer in {CASES!r}:
        result = largest(list(numbers))
        assert result == answer
        assert answer == result
        assert not result != answer

def test_approximately():
    assert largest({CASES[3][0]}) == pytest.approx({CASES[3][1]})
    assert abs(largest({CASES[5][0]}) - {CASES[5][1]}) < 1e-6

def test_nothing():
    with pytest.raises(ValueError):
        largest([])
"""
    return {"question": _QUESTION, "solution": HONEST, "test": test}


def code_contests() -> dict[str, Any]:
    def tests(cases: list[tuple[list[int], int]]) -> dict[str, list[str]]:
        return {
            "input": [" ".join(map(str, numbers)) + "\n" for numbers, _ in cases],
            "output": [f"{answer}\n" for _, answer in cases],
        }

    return {
        "description": "Write the largest of the numbers of a line.",
        "public_tests": tests(CASES[:1]),
        "private_tests": tests(CASES[1:3]),
        "generated_tests": tests(CASES[3:]),
        "time_limit": {"seconds": 1, "nanos": 0},
        "memory_limit_bytes": 256 << 20,
    }


def apps_program() -> dict[str, Any]:
    tests = {
        "inputs": [" ".join(map(str, numbers)) for numbers, _ in CASES],
        "outputs": [str(answer) for _, answer in CASES],
    }
    return {"question": "Write the largest of the numbers of a line.", "input_output": tests}


def packed(cases: Any) -> str:
    """Pack tests as LiveCodeBench does."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


FUNCTION_ITEMS = {
    make.__name__: make
    for make in (
        *(human_eval, human_eval_run, eval_plus, mbpp, mbpp_run),
        *(apps, live_code_bench, kod_code, kod_code_run),
    )
}
PROGRAM_ITEMS = {make.__name__: make for make in (code_contests, apps_program)}
