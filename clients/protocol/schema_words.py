"""JSON Schemas of single values in words, for messages, help and pages: `a whole number from 2 to 30`."""

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {
    "integer": ("a whole number", "whole numbers"),
    "number": ("a number", "numbers"),
    "string": ("text", "texts"),
    "boolean": ("true or false", "booleans"),
    "array": ("a list", "lists"),
    "object": ("an object", "objects"),
}


def wanted(schema: Mapping[str, Any], *, none: str = "None") -> str:
    """Describe the values that a schema allows.

    Args:
        schema: The JSON Schema of one value; keywords other than those of types, bounds, lengths, patterns and choices
            are passed over.
        none: The word for null: None in Python, null in JSON.
    """
    if "enum" in schema:
        return _one_of(schema["enum"], none)
    if "anyOf" in schema:
        return " or ".join(wanted(part, none=none) for part in schema["anyOf"])
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    ways = [_of_kind(kind, schema, none) for kind in kinds if kind != "null"] or ["anything"]
    if "null" in kinds:
        ways = [way for way in ways if way != "anything"] + [none]
    return " or ".join(ways)


def _one_of(values: Sequence[Any], none: str) -> str:
    words = [none if value is None else repr(value) for value in values]
    if len(words) <= 2:
        return " or ".join(words)
    return f"one of {', '.join(words[:-1])} or {words[-1]}"


def _of_kind(kind: str, schema: Mapping[str, Any], none: str) -> str:
    name = _NAMES[kind][0] if kind in _NAMES else kind
    if kind in ("integer", "number"):
        return f"{name}{_bounds(schema)}"
    if kind == "array":
        return _list(schema, none)
    if kind == "string" and "pattern" in schema:
        return f"{name} like {schema['pattern']}"
    return name


def _bounds(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and most is not None:
        return f" from {least} to {most}"
    bounds = [
        f"{words} {schema[keyword]}"
        for keyword, words in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most" if "exclusiveMinimum" in schema else "of at most"),
            ("exclusiveMaximum", "below"),
        )
        if keyword in schema
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _list(schema: Mapping[str, Any], none: str) -> str:
    items = schema.get("items", {})
    if "enum" in items:
        return f"some of {', '.join(repr(value) for value in items['enum'])}"
    count = _count(schema.get("minItems"), schema.get("maxItems"))
    kind = items.get("type")
    if not isinstance(kind, str) or kind not in _NAMES:
        return f"a list of {count}values" if count else "a list"
    return f"a list of {count}{_NAMES[kind][1]}{_bounds(items)}"


def _count(fewest: int | None, most: int | None) -> str:
    if fewest is None and most is None:
        return ""
    if most is None:
        return f"at least {fewest} "
    if fewest is None:
        return f"at most {most} "
    return f"{most} " if fewest == most else f"{fewest} to {most} "
