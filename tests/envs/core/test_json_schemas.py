"""Schemas that strangers wrote, and values that strangers hold against them: typed refusals, at a bounded cost."""

import json
import math
import re
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from rollgym.envs.core.json_schemas import SchemaValidator
from rollgym.envs.core.patterns import TooMuchWorkError
from rollgym.envs.core.schema_parts import SchemaError

EVIL = "(x+x+)+y\\1"


def nested(levels: int, wrap: Any, inner: Any) -> Any:
    for _ in range(levels):
        inner = wrap(inner)
    return inner


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ([], "as a mapping"),
        ({"type": "nonsense"}, "no JSON Schema: 'nonsense'"),
        ({"properties": 3}, "no JSON Schema: 3 is not of type 'object'"),
        ({"items": {"anyOf": [{"minimum": "1"}]}}, "no JSON Schema: '1' is not of type 'number'"),
        ({"description": "x" * 70_000}, "at most 65536 characters"),
        ({"default": {1, 2}}, "cannot be read"),
        (nested(10_000, lambda part: {"not": part}, {}), "nested more than 200 deep"),
        ({"multipleOf": math.inf}, "multipleOf of a schema is not finite"),
        ({"pattern": "("}, "'(' is no regular expression"),
        ({"items": {"patternProperties": {"(?:a{1000}){1000}": {}}}}, "repeats too much"),
        ({"$dynamicRef": "#"}, "say $ref instead"),
        ({"$ref": "http://127.0.0.1:1/schema"}, "nothing is fetched; put what it means under $defs"),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, "nothing is fetched"),
        ({"$ref": "#/$defs/absent"}, "leads nowhere"),
        ({"$ref": "#/required", "required": ["a"]}, "which is no schema"),
        ({"$ref": "#/other", "other": {"type": "nonsense"}}, "no JSON Schema"),
        ({"$id": "http://[::1", "items": {"$ref": "x"}}, "its $id or $ref cannot be read"),
        ({"$ref": "#"}, "round in circles"),
        (
            {"properties": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/properties/a"}]}}},
            "round in circles",
        ),
        (
            {"$id": "http://a/b", "$ref": "c", "$defs": {"c": {"$id": "c", "$anchor": "d", "$ref": "#d"}}},
            "round in circles",
        ),
        (
            {"$defs": {f"d{each}": {"$ref": f"#/$defs/d{each + 1}"} for each in range(500)} | {"d500": {}}}
            | {"$ref": "#/$defs/d0"},
            "within one another",
        ),
        (
            {"patternProperties": {"a": {}}, "allOf": [{"unevaluatedProperties": False}]},
            "say additionalProperties instead",
        ),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_before_any_value(schema: Any, said: str) -> None:
    begun = time.process_time()
    with pytest.raises(SchemaError, match=re.escape(said)):
        SchemaValidator(schema)
    assert time.process_time() - begun < 2


ODD = [{}, *range(8_000)]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ODD},
        {"items": {"required": ODD}},
        {"not": {"dependentRequired": {"a": ODD}}},
        {"dependencies": {"a": ODD}},
    ],
)
def test_lists_that_should_have_texts_are_not_compared_with_each_other(schema: dict[str, Any]) -> None:
    begun = time.process_time()
    with pytest.raises(SchemaError, match=re.escape("has texts, and not {}")):
        SchemaValidator(schema)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"multipleOf": 0.01}, math.inf, "is not finite"),
        ({}, {"a": [1.0, -math.inf]}, "is not finite"),
        ({"type": "number"}, math.nan, "is not finite"),
        ({"type": "number"}, True, "True is not of type 'number'"),
        ({"type": "integer"}, False, "False is not of type 'integer'"),
        ({"enum": [1, "a"]}, True, "True is not one of [1, 'a']"),
        ({"multipleOf": 0.01}, 19.995, "19.995 is not a multiple of 0.01"),
        ({"multipleOf": 10**400}, 1.5, "is not a multiple of"),
        ({"type": "string"}, [1 << 100_000], "too many digits"),
        ({"items": {"type": "integer"}}, ["x" * 1_000_000], "is not of type 'integer'"),
        ({"items": {"maxLength": 5}}, ["x" * 1_000_000], "is too long"),
        ({"items": {"pattern": "^a"}}, ["ab", "ba"], "'ba' does not match '^a'"),
        ({"patternProperties": {"^x": {"type": "string"}}}, {"x1": 1}, "1 is not of type 'string'"),
        (
            {"patternProperties": {"^x": {}}, "additionalProperties": {"type": "string"}},
            {"x": 1, "y": 2},
            "2 is not",
        ),
        ({"patternProperties": {"^x": {}}, "additionalProperties": False}, {"y": 2}, "'y' was unexpected"),
    ],
)
def test_a_value_that_does_not_fit_is_told(schema: dict[str, Any], value: Any, said: str) -> None:
    misfit = SchemaValidator(schema).misfit(value)
    assert misfit is not None
    assert said in misfit.message
    assert not SchemaValidator(schema).fits(value)


def test_looking_at_many_numbers_deep_within_a_value_takes_less_memory_than_they_do() -> None:
    value = {"a": nested(190, lambda part: [part], [1] * 30_000)}
    validator = SchemaValidator({})
    tracemalloc.start()
    assert validator.fits(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_what_is_no_json_is_told_with_its_place() -> None:
    value = {"a": [1, {"b": math.nan}, math.inf], "c": [[]], "d": -math.inf}
    told = [list(misfit.absolute_path) for misfit in SchemaValidator({}).misfits(value)]
    assert told == [["a", 1, "b"], ["a", 2], ["d"]]


def test_numbers_are_divided_as_they_are_written() -> None:
    hundredths = SchemaValidator({"multipleOf": 0.01})
    assert all(hundredths.fits(value) for value in (19.99, 1.1, 0.07, -3, 10**400, 1e308))
    assert SchemaValidator({"multipleOf": 1e-300}).fits(1e300)


AB = {"a": 1, "b": 2}


def doubled(keyword: str, twice: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema that looks twice at the next, which looks twice at the next."""
    definitions = {f"d{each}": {keyword: twice({"$ref": f"#/$defs/d{each + 1}"})} for each in range(20)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {"d20": {}}}


MANY = [[0.5] * 1_000] * 5
TREE = {"items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, nested(10_000, lambda part: [part], 1)),
        (TREE, nested(190, lambda part: [part], 1)),
        ({"enum": [nested(150, lambda part: [part], 1)]}, nested(10_000, lambda part: {"a": part}, 1)),
        ({"items": {"pattern": EVIL}}, ["x" * 5_000]),
        ({"patternProperties": {EVIL: {}}}, {"x" * 5_000: 1}),
        ({"patternProperties": {EVIL: {}}, "additionalProperties": False}, {"x" * 5_000: 1}),
        ({"propertyNames": {"pattern": EVIL}}, {"x" * 5_000: 1}),
        ({"items": {"pattern": EVIL}}, [*("x" * length + "z" for length in range(18, 400))]),
        (
            {"uniqueItems": True, "items": TREE | {"uniqueItems": True}},
            nested(180, lambda part: [part, 2], 1),
        ),
        (
            {"unevaluatedProperties": False}
            | doubled("dependentSchemas", lambda each: {"a": each, "b": each}),
            AB,
        ),
        ({"unevaluatedProperties": False} | doubled("allOf", lambda each: [each, each]), AB),
        ({"unevaluatedItems": False} | doubled("anyOf", lambda each: [each, each]), [1]),
        ({"allOf": [{"items": {}}] * 4_000}, list(range(100_000))),
        ({"items": {"anyOf": [{"const": "x" * 500}] * 100}}, ["y" * 5_000] * 1_000),
        ({"$defs": {"a": {"const": MANY}}, "items": {"allOf": [{"$ref": "#/$defs/a"}] * 100}}, [MANY] * 100),
    ],
)
def test_a_value_that_takes_too_much_work_is_refused(schema: dict[str, Any], value: Any) -> None:
    validator = SchemaValidator(schema)
    begun = time.process_time()
    with pytest.raises(TooMuchWorkError):
        list(validator.misfits(value))
    # A second where nothing else runs; without a bound, minutes and more.
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"uniqueItems": True}, [{"": number} for number in range(20_000)]),
        (
            {
                "unevaluatedProperties": False,
                "anyOf": [{"properties": {f"p{each}": {}}} for each in range(500)],
            },
            {f"p{each}": 1 for each in range(500)},
        ),
        ({"unevaluatedItems": False, "contains": {"type": "integer"}}, list(range(4_000))),
        ({"uniqueItems": True}, [number * (2**61 - 1) for number in range(20_000)]),
        ({"items": {"enum": [f"value {number}" for number in range(3_000)]}}, ["value 2999"] * 10_000),
        ({"items": {"type": "string", "maxLength": 10**7}}, ["x" * 5_000_000]),
    ],
)
def test_large_values_are_taken_in_one_walk(schema: dict[str, Any], value: Any) -> None:
    begun = time.process_time()
    assert SchemaValidator(schema).fits(value)
    # A second where nothing else runs; without a bound, minutes and more.
    assert time.process_time() - begun < 20


def test_patterns_that_are_each_quick_enough_have_one_limit_together() -> None:
    slow = next(
        text
        for text in ("x" * length for length in range(50, 5_000, 10))
        if _seconds(partial(_searched, text)) > 0.02
    )
    _searched(slow)
    with pytest.raises(TooMuchWorkError, match="takes over"):
        SchemaValidator({"items": {"anyOf": [{"pattern": EVIL}, {}]}}).fits([slow] * 100)


def _searched(text: str) -> None:
    SchemaValidator({"pattern": EVIL}).fits(text)


def _seconds(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def test_a_reference_to_itself_goes_as_deep_as_a_value_does() -> None:
    validator = SchemaValidator(TREE | {"type": ["array", "integer"]})
    assert validator.fits([[[1], [2, [3]]]])
    assert not validator.fits([[[1], [2, ["3"]]]])


def names(count: int, name: str) -> dict[str, Any]:
    return {"$defs": {f"d{each}": {name: f"d{each}", "type": "integer"} for each in range(count)}}


NAMED_OTHERWISE = pytest.mark.parametrize(("name", "sign"), [("$anchor", "#"), ("$id", "")])


@NAMED_OTHERWISE
def test_a_reference_by_another_name_than_its_place(name: str, sign: str) -> None:
    within = {
        "$id": "http://a/within/",
        "items": {"$ref": "e#f"},
        "$defs": {"e": {"$id": "e", **names(3, name)}},
    }
    within["$defs"]["e"]["$defs"]["g"] = {"$anchor": "f", "type": "string"}
    schema = names(3, name) | {"prefixItems": [{"$ref": f"{sign}d1"}, within]}
    assert SchemaValidator(schema).fits([1, ["text"]])
    misfits = SchemaValidator(schema).misfits([1.5, [1]])
    assert [list(misfit.absolute_path) for misfit in misfits] == [[0], [1, 0]]


@NAMED_OTHERWISE
def test_a_reference_by_another_name_costs_no_more_than_by_its_place(name: str, sign: str) -> None:
    def cost(count: int) -> float:
        refs = {f"p{each}": {"$ref": f"{sign}d{each}"} for each in range(100)}
        schema = names(count, name) | {"properties": refs}
        value = {f"p{each}": each for each in range(100)}
        validator = SchemaValidator(schema, trusted=True)
        assert validator.fits(value)
        return min(_seconds(partial(validator.fits, value)) for _ in range(3))

    assert cost(2_000) < 4 * cost(200) + 0.01


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"%" * 10_000: {"type": "integer"}}, "items": {"$ref": "#/$defs/" + "%25" * 10_000}},
        {"$id": "http://a/b", "items": {"$id": "a/" * 15_000, "type": "integer"}},
    ],
)
def test_a_long_name_of_a_place_is_read_once(schema: dict[str, Any]) -> None:
    short = {"$defs": {"a": {"type": "integer"}}, "items": {"$ref": "#/$defs/a"}}
    value = list(range(2_000))
    costs = [_seconds(partial(SchemaValidator(each).fits, value)) for each in (schema, short)]
    assert costs[0] < 4 * costs[1] + 0.02


def test_what_a_trusted_schema_says_is_not_counted() -> None:
    schema = {"items": {"type": "integer", "minimum": 0}}
    assert SchemaValidator(schema, trusted=True).fits(list(range(50_000)))
    with pytest.raises(TooMuchWorkError):
        SchemaValidator(schema).fits(list(range(50_000)))
    assert SchemaValidator({"description": "x" * 70_000}, trusted=True).fits(1)


def test_a_schema_is_as_long_as_its_text_in_any_script() -> None:
    assert SchemaValidator({"description": "\u5b57" * 60_000}).fits(1)
    with pytest.raises(SchemaError, match="at most 65536 characters"):
        SchemaValidator({"description": "\u5b57" * 70_000})


def test_two_values_are_held_against_two_schemas_at_once() -> None:
    one = SchemaValidator({"items": {"enum": [1]}}).misfits([2, 3])
    other = SchemaValidator({"items": {"enum": [5]}}).misfits([6, 5])
    assert next(one).message == "2 is not one of [1]"
    assert next(other).message == "6 is not one of [5]"
    assert next(one).message == "3 is not one of [1]"
    assert next(other, None) is None


def test_large_schemas_are_not_kept() -> None:
    def read(number: int) -> None:
        required = [f"name {number} {each}" for each in range(3_000)]
        assert SchemaValidator({"required": required}).misfit({}) is not None

    read(0)
    tracemalloc.start()
    for number in range(1, 20):
        read(number)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1_000_000


def test_a_schema_is_copied() -> None:
    schema: dict[str, Any] = {"$schema": "http://json-schema.org/draft-07/schema#", "enum": [1]}
    validator = SchemaValidator(schema)
    assert "$schema" in schema
    schema["enum"].append(2)
    assert not validator.fits(2)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, "", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
SCHEMAS = st.recursive(
    st.booleans()
    | st.fixed_dictionaries({}, optional={"type": st.sampled_from(["integer", "string", "array", "object"])})
    | st.fixed_dictionaries({"enum": st.lists(JSON, max_size=3)})
    | st.fixed_dictionaries({"const": JSON})
    | st.fixed_dictionaries({"pattern": st.sampled_from(["a", "^b", "b$"])})
    | st.fixed_dictionaries({"uniqueItems": st.booleans(), "minItems": st.integers(0, 2)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "patternProperties": st.dictionaries(st.sampled_from(["a", "[bc]"]), inner, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "not": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "if": inner,
            "then": inner,
            "dependentSchemas": st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "contains": inner,
            "unevaluatedItems": inner,
            "unevaluatedProperties": inner,
        },
    ),
    max_leaves=6,
)


def refused(schema: Any) -> bool:
    return "unevaluatedProperties" in (text := json.dumps(schema)) and "patternProperties" in text


@settings(max_examples=300)
@given(schema=SCHEMAS.filter(lambda each: isinstance(each, dict) and not refused(each)), value=JSON)
def test_what_fits_is_what_json_schema_says(schema: dict[str, Any], value: Any) -> None:
    expected = Draft202012Validator(schema).is_valid(json.loads(json.dumps(value)))
    assert SchemaValidator(schema).fits(value) == expected
