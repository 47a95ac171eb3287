"""Values drawn from JSON Schemas fit them, ordinary and odd ones."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rollgym.clients.checks.tool_replies import SchemaNote, SchemaValues

LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 3, "maxLength": 5},
        {"type": "string", "pattern": "^[0-9]+$"},
        {"type": "string", "format": "date"},
        {"type": "integer"},
        {"type": "integer", "minimum": -2, "exclusiveMaximum": 3},
        {"type": "integer", "multipleOf": 7, "minimum": 1},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": ["integer", "null"]},
        {"type": "boolean"},
        {"enum": ["a", 1, None]},
        {"const": {"x": 1}},
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        {"$ref": "#/$defs/name"},
        {"allOf": [{"type": "string"}, {"maxLength": 4}]},
        {},
    ]
)


def _objects(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.dictionaries(st.sampled_from(["a", "b", "c"]), part, max_size=3)
    return st.builds(
        lambda properties, required, extra: {
            "type": "object",
            "properties": properties,
            "required": [name for name in required if name in properties],
            "additionalProperties": extra,
        },
        names,
        st.sets(st.sampled_from(["a", "b", "c"])).map(sorted),
        st.booleans(),
    )


def _arrays(part: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        part,
        st.integers(0, 3),
        st.integers(0, 3),
    )


SCHEMAS = _objects(st.recursive(LEAVES, lambda part: _objects(part) | _arrays(part), max_leaves=4))


@given(SCHEMAS, st.integers(0, 2**32))
def test_what_is_drawn_fits(schema: dict[str, Any], seed: int) -> None:
    whole = {**schema, "$defs": {"name": {"type": "string", "minLength": 1, "maxLength": 9}}}
    values = SchemaValues(whole, seed)
    validator = Draft202012Validator(whole)
    for value in (values.ordinary(), values.ordinary(optional=False), *values.odd()):
        assert validator.is_valid(value), value


def test_odd_values_are_those_that_break_tools() -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
    drawn = list(SchemaValues(schema, 0).odd())
    texts = {value["text"] for value in drawn if "text" in value}
    assert {"", "'; DROP TABLE users; --", "<|im_end|></tool_call>", "漢字😀"} <= texts
    assert max(map(len, texts)) == 10_000
    assert {10**30, -1, 0} <= {value.get("n") for value in drawn}
    assert {} in drawn
    assert any("unexpected" in value for value in drawn)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"not": {}}}, "required": ["a"]}, "'not' are not drawn"),
        ({"$ref": "https://example.org/a"}, "not local"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"$ref": "#"}, "nested more than"),
        ({"type": "string", "pattern": "^q{30}$"}, "give the schema `examples`"),
        ({"type": "array", "minItems": 10**9}, "minItems is 1000000000"),
        (False, "admits no value"),
    ],
)
def test_what_is_not_drawn_from_is_refused_in_a_sentence(schema: Any, said: str) -> None:
    with pytest.raises(SchemaNote, match=said):
        SchemaValues(schema, 0).ordinary()


def test_recursive_schemas_end() -> None:
    node = {"type": "object", "properties": {name: {"$ref": "#"} for name in "abcdefgh"}}
    assert len(list(SchemaValues(node, 0).odd())) < 20_000
    linked = {"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}}}
    assert isinstance(SchemaValues(linked, 0).ordinary(), dict)
