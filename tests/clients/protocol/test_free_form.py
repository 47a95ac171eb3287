"""What the schema says of free-form values is what is taken and what is refused."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rollgym.clients.protocol.free_form import FreeFields, FreeForm, FreeValue, VerifyItem
from rollgym.clients.protocol.values import DecodeError, decode_value

LIMIT = 2**53
NUMBERS = st.integers(-(2**70), 2**70) | st.sampled_from([LIMIT, LIMIT - 1, -LIMIT, 1 - LIMIT, 2**63, 2**64])
VALUES = st.recursive(
    st.none() | st.booleans() | st.text(max_size=5) | st.floats(-1e15, 1e15) | NUMBERS,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=3), part, max_size=3),
    max_leaves=6,
)


class Asked(BaseModel):
    value: FreeValue = None
    fields: FreeFields | None = None
    items: list[VerifyItem] = []


SCHEMA = Asked.model_json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def is_read(value: Any) -> bool:
    try:
        decode_value(None, value)
    except DecodeError:
        return False
    return True


@given(value=VALUES)
def test_the_schema_allows_what_is_read(value: Any) -> None:
    assert VALIDATOR.is_valid({"value": value}) == is_read(value)
    assert VALIDATOR.is_valid({"fields": {"a": value}}) == is_read(value)
    assert VALIDATOR.is_valid({"items": [{"response": "4", "answer": value}]}) == is_read(value)


@pytest.mark.parametrize(
    ("item", "allowed"),
    [({"response": "4"}, True), ({"answer": "4"}, False), ({"response": 4}, False), (["4"], False)],
)
def test_an_item_to_verify_has_a_response(item: Any, allowed: bool) -> None:
    assert VALIDATOR.is_valid({"items": [item]}) is allowed


def test_the_form_is_one_component_whoever_refers_to_it() -> None:
    assert list(SCHEMA["$defs"]) == [FreeForm.__name__] == ["FreeForm"]
    assert '"#/$defs/FreeForm"' in json.dumps(SCHEMA["properties"]["value"])


def test_nothing_is_validated_before_it_is_known_what_a_value_is_for() -> None:
    assert Asked(value=[LIMIT, {"a": -LIMIT}]).value == [LIMIT, {"a": -LIMIT}]
