"""Grading of function calls: the recorded verdicts of BFCL v4's checker, and cases of our own."""

import json

import pytest

from rollgym.envs.tools.bfcl import grade_calls
from tests.support.recorded_data import recorded

ORDER = {
    "name": "shop.order",
    "parameters": {
        "type": "dict",
        "properties": {
            "item": {"type": "string"},
            "count": {"type": "integer"},
            "price": {"type": "float"},
            "gift": {"type": "boolean"},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "address": {"type": "dict", "properties": {"city": {"type": "string"}}},
            "lines": {"type": "array", "items": {"type": "dict"}},
        },
        "required": ["item"],
    },
}
WANTED = {
    "item": ["Red lamp", "lamp, red"],
    "count": [2, ""],
    "price": [10.0, ""],
    "gift": [True, ""],
    "sizes": [[1, 2], ""],
    "address": [{"city": ["New York"], "zip": ["10001", ""]}, ""],
    "lines": [[{"key": ["a"]}, {"key": ["b"]}], ""],
}


def grade(**arguments):
    return grade_calls(
        [ORDER], [{"shop.order": arguments}], [{"shop.order": WANTED}], "simple_python"
    ).error_type


def test_every_recorded_verdict():
    rows = [json.loads(line) for line in recorded("bfcl_ast_cases.jsonl").read_text().splitlines()]
    assert len(rows) == 2098
    differing = []
    for row in rows:
        found = grade_calls(row["functions"], row["calls"], row["possible_answer"], row["category"])
        # A good verdict has an error type there, too, where the checker began with one.
        error_type = None if row["valid"] else row["error_type"]
        if (found.valid, found.error_type) != (row["valid"], error_type):
            differing.append(row["id"])
    assert differing == []


@pytest.mark.parametrize(
    ("arguments", "error_type"),
    [
        ({"item": "red LAMP"}, None),
        ({"item": "Lamp-Red", "count": 2, "price": 10, "gift": True}, None),
        ({"item": "red lamp", "sizes": [1, 2], "address": {"city": "new york"}}, None),
        ({"item": "red lamp", "sizes": []}, None),
        ({"item": "red lamp", "lines": [{"key": "A"}, {"key": "b"}]}, None),
        ({}, "simple_function_checker:missing_required"),
        ({"item": "lamp"}, "value_error:string"),
        ({"item": 5}, "type_error:simple"),
        ({"item": "red lamp", "count": True}, "type_error:simple"),
        ({"item": "red lamp", "count": 2.0}, "type_error:simple"),
        ({"item": "red lamp", "count": 3}, "value_error:others"),
        ({"item": "red lamp", "sizes": [2, 1]}, "value_error:list/tuple"),
        ({"item": "red lamp", "colour": "red"}, "simple_function_checker:unexpected_param"),
        ({"item": "red lamp", "address": {"town": "x"}}, "value_error:dict_key"),
        ({"item": "red lamp", "address": {"city": "Oslo"}}, "value_error:dict_value"),
        ({"item": "red lamp", "address": {}}, "value_error:dict_key"),
        ({"item": "red lamp", "lines": [{"key": "a"}]}, "value_error:list_dict_count"),
        # The mark for optional is compared last, and its error is the one that stays.
        ({"item": "red lamp", "lines": [{"key": "b"}, {"key": "a"}]}, "value_error:list_dict_count"),
    ],
)
def test_one_call(arguments, error_type):
    assert grade(**arguments) == error_type


def test_calls_in_parallel_take_any_order_and_each_counts_once():
    wanted = [{"shop.order": {"item": [name]}} for name in ("lamp", "desk")]
    calls = [{"shop.order": {"item": name}} for name in ("desk", "lamp")]
    assert grade_calls([ORDER], calls, wanted, "parallel").valid
    assert not grade_calls([ORDER], [calls[0], calls[0]], wanted, "parallel").valid
    assert grade_calls([ORDER], calls[:1], wanted, "parallel_multiple").error_type == (
        "parallel_function_checker_no_order:wrong_count"
    )


def test_integers_in_an_array_of_floats_are_of_another_type_as_in_bfcl():
    properties = {"weights": {"type": "array", "items": {"type": "float"}}, "price": {"type": "float"}}
    function = {
        "name": "weigh",
        "parameters": {"type": "dict", "properties": properties, "required": ["weights"]},
    }
    wanted = [{"weigh": {"weights": [[1.0, 2.0]], "price": [3.0, ""]}}]

    def error_type(**arguments):
        return grade_calls([function], [{"weigh": arguments}], wanted, "simple_python").error_type

    assert error_type(weights=[1.0, 2.0], price=3) is None
    assert error_type(weights=[1, 2]) == "type_error:nested"


def test_the_first_call_that_fits_an_answer_takes_it_as_in_bfcl():
    wanted = [{"shop.order": {"item": names}} for names in (["lamp", "desk"], ["lamp"])]
    calls = [{"shop.order": {"item": name}} for name in ("lamp", "desk")]
    assert grade_calls([ORDER], [*reversed(calls)], wanted, "parallel").valid
    assert not grade_calls([ORDER], calls, wanted, "parallel").valid


def test_an_optional_argument_with_values_may_be_left_out_and_another_may_not():
    wanted = [{"shop.order": {"item": ["lamp"], "count": [2]}}]
    found = grade_calls([ORDER], [{"shop.order": {"item": "lamp"}}], wanted, "simple_python")
    assert found.error_type == "simple_function_checker:missing_optional"


def test_nothing_that_a_policy_says_raises():
    for value in (
        None,
        float("nan"),
        [],
        {},
        [None],
        [[1]],
        {"": None},
        "x" * 10_000,
        10**400,
        [{"key": 1}, 2],
    ):
        for name in WANTED:
            arguments = {"item": "red lamp", name: value}
            assert isinstance(
                grade_calls([ORDER], [{"shop.order": arguments}], [{"shop.order": WANTED}], "multiple").valid,
                bool,
            )
