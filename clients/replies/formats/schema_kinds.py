"""Which types of JSON a schema allows, as far as reading a value needs to know; no schema is too strange for it."""

from collections.abc import Iterator, Mapping
from typing import Any

_KINDS = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_TEXT = frozenset({"string"})
_MOST_PARTS = 64
"""So many parts of a schema are looked at."""
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def kinds_of(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the types that a schema allows; text alone where it names none.

    Args:
        schema: Of one value.
        root: Where its references lead: the schema of all arguments.
    """
    found: set[str] = set()
    waiting, followed = [schema], set[str]()
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        found.update(_named(part))
        waiting += _alternatives(part)
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_referred(reference, root))
    return frozenset(found) or _TEXT


def kind_of(value: Any) -> frozenset[str]:
    """Return the names that schemas have for the type of a value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    if isinstance(value, str):
        return _TEXT
    return frozenset({"array"} if isinstance(value, list) else {"object"})


def _named(schema: Mapping[str, Any]) -> Iterator[str]:
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        yield from _KINDS.intersection([kinds] if isinstance(kinds, str) else filter(_is_text, kinds))
    elif isinstance(schema.get("enum"), list):
        for value in schema["enum"][:_MOST_PARTS]:
            yield from kind_of(value)
    elif "const" in schema:
        yield from kind_of(schema["const"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    lists = [schema[word] for word in _ALTERNATIVES if isinstance(schema.get(word), list)]
    return [part for parts in lists for part in parts[:_MOST_PARTS]]


def _referred(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Name` names; None where there is none."""
    if not reference.startswith("#/"):
        return None
    part = root
    for name in reference[2:].split("/", _MOST_PARTS):
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
