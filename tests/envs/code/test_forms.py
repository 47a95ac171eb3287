"""Items in the forms of others."""

import base64
import json
import pickle
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.envs.code.forms import read_item, read_question
from rollgym.envs.code.item import ItemError
from tests.support import code_items
from tests.support.code_items import CASES, FUNCTION_ITEMS, PROGRAM_ITEMS, packed


@pytest.mark.parametrize(
    ("make", "form", "entry", "visible"),
    [
        (code_items.human_eval, "HumanEval", "largest", 1),
        (code_items.eval_plus, "EvalPlus", "largest", 2),
        (code_items.mbpp, "MBPP", None, 1),
        (code_items.apps, "APPS", "largest", 2),
        (code_items.apps_program, "APPS", None, 2),
        (code_items.code_contests, "CodeContests", None, 1),
        (code_items.live_code_bench, "LiveCodeBench", "largest", 1),
        (code_items.kod_code, "KodCode", None, 1),
    ],
)
def test_a_form(make, form, entry, visible):
    item = read_item(make())
    assert (item.form, item.tests, item.entry, item.visible) == (form, len(CASES), entry, visible)
    assert item.question


def test_limits_of_a_contest():
    item = read_item({**code_items.code_contests(), "time_limit": {"seconds": 2, "nanos": 500_000_000}})
    assert (item.seconds, item.memory_mb) == (2.5, 256)
    assert (
        read_item({**code_items.code_contests(), "time_limit": None, "memory_limit_bytes": 0}).seconds is None
    )


def test_public_tests_alone_are_hidden_too():
    item = read_item({"public_tests": {"input": ["1\n"], "output": ["1\n"]}, "description": "x"})
    assert (item.tests, item.visible) == (1, 0)


@pytest.mark.parametrize(
    "make", [code_items.mbpp, code_items.apps, code_items.live_code_bench, code_items.kod_code]
)
def test_an_item_that_asks_nothing_can_be_graded_and_not_shown(make):
    fields = {
        name: value for name, value in make().items() if name not in ("text", "question", "question_content")
    }
    assert read_item(fields).tests == len(CASES)
    with pytest.raises(ItemError, match="asks no question"):
        read_question(fields)


def test_assertions_become_data():
    suite = read_item(FUNCTION_ITEMS["human_eval"]()).suite
    assert suite is not None
    assert len(suite.pairs) == len(CASES)
    assert not suite.cases
    assert suite.pairs[0].assertion.literal() == (([3, 1, 2],), {}, 3)


def test_an_assertion_that_is_true_of_any_program_is_no_test():
    test = "def check(candidate):\n    assert True\n    assert candidate(1) == 2\n    assert 1 + 1 == 2\n"
    assert read_item({"prompt": "", "entry_point": "f", "test": test}).tests == 1


def test_many_right_outputs():
    tests = {"inputs": ["1"], "outputs": [[["a"], ["b"]]]}
    (stream,) = read_item({"question": "x", "input_output": tests}).streams
    assert stream.accepted == ["a", "b"]


def test_a_wrapped_output_is_right_either_way():
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": [[2]]}
    (call,) = read_item({"question": "x", "input_output": tests}).calls
    assert call.accepted == [[2], 2]


def test_lines_of_json_as_arguments():
    tests = {"fn_name": "Solution.f", "inputs": ['[1, 2]\n"a"'], "outputs": ["3"]}
    (call,) = read_item({"question": "x", "input_output": json.dumps(tests)}).calls
    assert (call.name, call.args, call.accepted) == ("f", [[1, 2], "a"], [3])


class Hostile:
    def __reduce__(self):
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode(), "builtins.print"),
        (base64.b64encode(zlib.compress(b"junk")).decode(), "cannot be unpacked"),
        (base64.b64encode(b"junk").decode(), "cannot be unpacked"),
        ("no base 64!", "cannot be unpacked"),
        ("[1", "no JSON"),
        (packed("text"), "no JSON"),
        (packed({"input": "1"}), "list of objects"),
        (7, "list of objects"),
    ],
)
def test_private_tests_that_are_none(field, message, capsys):
    with pytest.raises(ItemError, match=message):
        read_item({**code_items.live_code_bench(), "private_test_cases": field})
    assert "unpickled" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no known form"),
        ({"response": "x"}, "no known form"),
        ({"entry_point": "f", "test": "def check(candidate): pass", "prompt": ""}, "no tests"),
        ({"entry_point": "f", "test": "x = 1", "prompt": ""}, "check"),
        ({"entry_point": "f", "test": "def check(", "prompt": ""}, "no Python"),
        ({"entry_point": 3, "test": "", "prompt": ""}, "entry_point"),
        ({"test_list": ["assert f("], "prompt": "x"}, "no Python"),
        ({"test_list": [3], "prompt": "x"}, "test_list"),
        ({"test_list": ["assert f() == 1"], "prompt": 3}, "prompt"),
        ({"question": "x", "input_output": "{"}, "no JSON"),
        ({"question": "x", "input_output": {"inputs": [1], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"question": "x", "input_output": {"inputs": [1], "outputs": [1]}}, "text"),
        ({"question": "x", "input_output": {"inputs": [[1]], "outputs": [1], "fn_name": "a b"}}, "no name"),
        ({"question": "x", "input_output": {"inputs": [1], "outputs": [1], "fn_name": "f"}}, "lists"),
        ({"description": "x", "public_tests": {"input": ["1"], "output": []}}, "1 inputs and 0 outputs"),
        ({"question": "x", "test": "x = 1"}, "no test function"),
        ({**code_items.live_code_bench(), "metadata": "{}"}, "func_name"),
        ({**code_items.apps(), "language": "cobol"}, "cobol"),
        ({**code_items.apps(), "language": "cpp"}, "cpp"),
    ],
)
def test_what_is_no_item_is_told_so(fields, message):
    with pytest.raises(ItemError, match=message):
        read_item(fields)


@given(
    form=st.sampled_from(sorted({**FUNCTION_ITEMS, **PROGRAM_ITEMS})),
    junk=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=6), parts, max_size=2),
        max_leaves=5,
    ),
    data=st.data(),
)
def test_a_broken_field_is_an_item_or_an_error_of_its_own(form, junk, data):
    fields = {**FUNCTION_ITEMS, **PROGRAM_ITEMS}[form]()
    fields[data.draw(st.sampled_from(sorted(fields)))] = junk
    with suppress(ItemError):
        assert read_item(fields).tests > 0
