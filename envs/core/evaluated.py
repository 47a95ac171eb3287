"""The part of a value that a schema, and those that apply to the same value, have left unevaluated.

The library looks for that without counting, twice at what is referred to twice, and compares each with each.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jsonschema

from rollgym.envs.core.schema_work import ITEMS_OF_A_LOOK, WORK


def unevaluated_items(
    validator: Any, _: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Refuse items that nothing has looked at and that do not fit `unevaluatedItems`."""
    if isinstance(instance, list):
        evaluated = _evaluated(validator, instance, schema)
        yield from _told("items", [each for index, each in enumerate(instance) if index not in evaluated])


def unevaluated_properties(
    validator: Any, _: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Refuse properties that nothing has looked at and that do not fit `unevaluatedProperties`."""
    if isinstance(instance, dict):
        evaluated = _evaluated(validator, instance, schema)
        yield from _told("properties", [name for name in instance if name not in evaluated])


def _told(kind: str, left: list[Any]) -> Iterator[jsonschema.ValidationError]:
    if left:
        found = f"{', '.join(map(repr, left))} {'was' if len(left) == 1 else 'were'} unexpected"
        yield jsonschema.ValidationError(f"Unevaluated {kind} are not allowed ({found})")


def _evaluated(validator: Any, instance: Any, schema: Any) -> set[str | int]:
    """Return the names or indices of what was looked at."""
    work = WORK.get()
    found: set[str | int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, bool):
            work.look(1 + len(instance) // ITEMS_OF_A_LOOK)
            found.update(_names(validator, instance, part) if isinstance(instance, dict) else ())
            found.update(_indices(validator, instance, part) if isinstance(instance, list) else ())
            waiting += _also(validator, instance, part)
    return found


def _names(validator: Any, instance: dict[str, Any], part: Mapping[str, Any]) -> Iterator[str | int]:
    yield from part.get("properties", {}).keys() & instance.keys()
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        yield from _fitting(validator, instance.items(), part.get(keyword, False))


def _indices(validator: Any, instance: list[Any], part: Mapping[str, Any]) -> Iterator[str | int]:
    yield from range(len(instance) if "items" in part else len(part.get("prefixItems", ())))
    for keyword in ("contains", "unevaluatedItems"):
        yield from _fitting(validator, enumerate(instance), part.get(keyword, False))


def _fitting(validator: Any, inner: Iterable[tuple[Any, Any]], part: Any) -> Iterator[str | int]:
    if part is not False:
        yield from (name for name, value in inner if _fits(validator, value, part))


def _also(validator: Any, instance: Any, part: Mapping[str, Any]) -> Iterator[Any]:
    """Return the schemas that hold for the same value because of a part, and that it fits."""
    if "$ref" in part:
        yield WORK.get().read.targets[id(part)]
    if isinstance(instance, dict):
        yield from (each for name, each in part.get("dependentSchemas", {}).items() if name in instance)
    for keyword in ("allOf", "oneOf", "anyOf"):
        yield from (each for each in part.get(keyword, ()) if _fits(validator, instance, each))
    if "if" in part:
        fits = _fits(validator, instance, part["if"])
        yield from (part["if"], part.get("then", True)) if fits else (part.get("else", True),)


def _fits(validator: Any, value: Any, part: Any) -> bool:
    return next(validator.descend(value, part), None) is None
