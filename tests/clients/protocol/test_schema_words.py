"""JSON Schemas in words."""

from typing import Any

import pytest

from rollgym.clients.protocol.schema_words import wanted


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"enum": ["a"]}, "'a'"),
        ({"enum": ["a", None]}, "'a' or None"),
        ({"enum": ["a", "b", None]}, "one of 'a', 'b' or None"),
        ({"type": "integer"}, "a whole number"),
        ({"type": "integer", "minimum": 2, "maximum": 9}, "a whole number from 2 to 9"),
        ({"type": "integer", "minimum": 2}, "a whole number of at least 2"),
        ({"type": "number", "maximum": 2}, "a number of at most 2"),
        (
            {"type": "number", "exclusiveMinimum": 0, "maximum": 60},
            "a number above 0 and at most 60",
        ),
        ({"type": ["number", "null"], "exclusiveMaximum": 1}, "a number below 1 or None"),
        ({"type": "boolean"}, "true or false"),
        ({"type": "string", "pattern": "^[-+*]+$"}, "text like ^[-+*]+$"),
        ({"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1}, "some of 'x', 'y'"),
        ({"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}, "a list of 3 numbers"),
        (
            {"type": "array", "items": {"type": "integer", "minimum": 4}},
            "a list of whole numbers of at least 4",
        ),
        ({"type": "array", "items": {"type": "object"}, "minItems": 1}, "a list of at least 1 objects"),
        ({"type": "array", "items": {}, "minItems": 1, "maxItems": 5}, "a list of 1 to 5 values"),
        ({"type": "array"}, "a list"),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "text or an object"),
        ({"type": "null"}, "None"),
        ({"type": "planet"}, "planet"),
        ({}, "anything"),
    ],
)
def test_what_is_wanted(schema: dict[str, Any], words: str) -> None:
    assert wanted(schema) == words


def test_null_in_json() -> None:
    assert wanted({"type": ["string", "null"]}, none="null") == "text or null"
