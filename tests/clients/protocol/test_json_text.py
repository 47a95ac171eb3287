"""Reading JSON with integers of any size."""

import json
import sys

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.evaluation.chat import ModelReply, RequestedCall
from rollgym.clients.evaluation.player import Conversation
from rollgym.clients.protocol.json_text import DEEPEST, is_shallow, read_json, read_shallow_json, write_json

_LONG = st.integers(min_value=10**17, max_value=10**300) | st.integers(
    min_value=-(10**300), max_value=-(10**17)
)


@given(
    st.text(max_size=9),
    st.lists(_LONG | st.text() | st.floats(allow_nan=False, allow_infinity=False), max_size=5),
)
def test_integers_are_exact_wherever_they_stand(before: str, values: list[object]) -> None:
    text = json.dumps({before: values})
    assert read_json(text) == read_json(text.encode()) == {before: values}


@pytest.mark.parametrize("offset", range(7))
def test_the_smallest_long_integers_at_each_offset(offset: int) -> None:
    for number in (-(2**63) - 1, -(2**63), 2**63, 2**64 - 1, 2**64):
        found = read_json(b" " * offset + str(number).encode())
        assert (type(found), found) == (int, number)


@pytest.mark.parametrize(
    "text", ["[NaN, 12345678901234567890]", '["\\ud800", 12345678901234567890]', "9" * 400, "1" * 1_000_000]
)
def test_what_is_no_json_is_refused_beside_long_integers(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        read_json(text)


def test_deep_nesting_beside_a_long_integer_is_no_crash() -> None:
    with pytest.raises(orjson.JSONDecodeError):
        read_json("[" * 10_000 + "12345678901234567890" + "]" * 10_000)
    text = "[" * 1_000 + "12345678901234567890" + "]" * 1_000
    if sys.version_info < (3, 12):
        with pytest.raises(orjson.JSONDecodeError, match="nested too deep"):
            read_json(text)
        return
    value = read_json(text)
    while isinstance(value, list):
        (value,) = value
    assert value == 12345678901234567890


@given(
    st.recursive(
        _LONG | st.text() | st.none() | st.booleans(),
        lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
        max_leaves=5,
    )
)
def test_what_is_written_is_read_back(value: object) -> None:
    assert read_json(write_json(value)) == value


def test_what_somebody_walks_through_is_no_deeper_than_may_be() -> None:
    value = read_shallow_json("[" * DEEPEST + "]" * DEEPEST)
    assert is_shallow(value)
    assert not is_shallow({"a": value})
    for depth in (DEEPEST + 1, 10_000):
        with pytest.raises(orjson.JSONDecodeError):
            read_shallow_json(b"[" * depth + b"]" * depth)
    with pytest.raises(TypeError):
        write_json([[[value]] * 2, 2**70])
    assert read_shallow_json(f"[{'[],' * 100_000}[]]") == [[]] * 100_001


def test_arguments_of_a_models_call_reach_the_environment_exactly() -> None:
    conversation = Conversation("How many?", {})
    action = conversation.hear(ModelReply(calls=(RequestedCall("1", "count", f'{{"to": {2**70}}}'),)))
    assert action is not None
    assert f'"to": {2**70}' in action


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_has_no_form_for_are_refused_wherever_they_stand(number: float) -> None:
    for value in (number, [None, {"a": [number]}], {"a": {"b": number, "c": 2**70}}):
        with pytest.raises(ValueError, match="JSON"):
            write_json(value)
    assert write_json([None, 1.5, "null"]) == b'[null,1.5,"null"]'
