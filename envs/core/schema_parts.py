"""Checks the parts of a JSON Schema one by one: that each is valid, and that its `$ref` resolves."""

import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

# Schemas that hold for the same value, one within another or by reference; each takes frames of Python's stack.
_LONGEST_CHAIN = 120
_LONGEST_REASON = 200
_KEPT = 4096
_LONGEST_KEPT = 2_000
_WORDS = ("title", "description", "$comment")
_NUMBERS = ("multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# Where a schema has others in it that hold for the same value: one, some, or some by name.
_ALSO = ("not", "if", "then", "else")
_ALSO_EACH = ("allOf", "anyOf", "oneOf")
_ALSO_BY_NAME = ("dependentSchemas",)
_WITHIN = (
    "additionalProperties",
    "contains",
    "contentSchema",
    "items",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_WITHIN_BY_NAME = ("$defs", "definitions", "patternProperties", "properties")
# Where the schema of schemas wants lists of texts that are all different.
_TEXTS = ("type", "required")
_TEXTS_BY_NAME = ("dependentRequired", "dependencies")
_META: Any = Draft202012Validator(Draft202012Validator.META_SCHEMA)


class SchemaParts(NamedTuple):
    """The parts of a schema.

    Attributes:
        all: All schemas within it, itself among them.
        targets: Target of each `$ref`, by the identity of the part that has it.
    """

    all: list[dict[str, Any]]
    targets: dict[int, Any]


class SchemaError(ValueError):
    """A JSON Schema cannot be used; its author has to fix it."""


def checked_parts(schema: dict[str, Any]) -> SchemaParts:
    """Return all schemas within a schema, with the targets of references, and drop `$schema` and `$id` from each.

    With `$schema`, parts could select validators without bounds: all are read as the dialect of 2020-12. With `$id`,
    the library would resolve an address at each validation.

    Raises:
        SchemaError: One is not a schema, or has a `$ref` that leaves the whole, resolves to nothing, or is circular.
    """
    found: dict[int, dict[str, Any]] = {}
    _gather(schema, found)
    targets: dict[int, Any] = {}
    try:
        same_value = _followed(schema, found, targets)
    except SchemaError:
        raise
    except ValueError as error:
        # From the standard library, for malformed addresses.
        raise SchemaError(f"its $id or $ref cannot be read: {error}") from error
    _refuse_circles(same_value)
    for part in found.values():
        part.pop("$id", None)
    return SchemaParts(list(found.values()), targets)


def _followed(
    schema: dict[str, Any], found: dict[int, dict[str, Any]], targets: dict[int, Any]
) -> dict[int, list[int]]:
    """Follow every `$ref`, and note its target; return for each part those that apply to the same value."""
    same_value: dict[int, list[int]] = {}
    resource = DRAFT202012.create_resource(schema)
    base = resource.id() or ""
    # Without this crawl, each `$ref` that names an `$id` or an `$anchor` would crawl the schema again.
    root = Registry().with_resource(base, resource).crawl().resolver(base)
    waiting: list[tuple[Any, Any]] = [(schema, root)]
    while waiting:
        part, resolver = waiting.pop()
        if isinstance(part, bool) or id(part) in same_value:
            continue
        # A reference may lead to a place that was not searched for schemas.
        _gather(part, found)
        resolver = resolver.in_subresource(DRAFT202012.create_resource(part))
        also = list(_also(part))
        waiting += [(each, resolver) for each in DRAFT202012.subresources_of(part)]
        if "$ref" in part:
            target = _target(part["$ref"], resolver)
            targets[id(part)] = target.contents
            also.append(target.contents)
            waiting.append((target.contents, target.resolver))
        same_value[id(part)] = [id(each) for each in also if not isinstance(each, bool)]
    return same_value


def _gather(part: Any, found: dict[int, dict[str, Any]]) -> None:
    """Look at a part and at those within it, and note them all."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if isinstance(part, bool) or id(part) in found:
            continue
        if not isinstance(part, dict):
            raise SchemaError(f"a $ref leads to {json.dumps(part)[:_LONGEST_REASON]}, which is no schema")
        part.pop("$schema", None)
        if "$dynamicRef" in part:
            raise SchemaError("$dynamicRef is not taken in schemas of others; say $ref instead")
        _refuse_odd_lists(part)
        reason = _reason(json.dumps(_shallow(part)))
        if reason is not None:
            raise SchemaError(f"this is no JSON Schema: {reason}")
        for name in _NUMBERS:
            if isinstance(part.get(name), float) and not math.isfinite(part[name]):
                raise SchemaError(f"{name} of a schema is not finite")
        found[id(part)] = part
        waiting += DRAFT202012.subresources_of(part)


def _refuse_odd_lists(part: Mapping[str, Any]) -> None:
    """Refuse lists of texts that have others in them: the library compares each of these with each."""
    for name in _TEXTS:
        _refuse_odd_list(name, part.get(name))
    for name in _TEXTS_BY_NAME:
        if isinstance(part.get(name), dict):
            for each in part[name].values():
                _refuse_odd_list(name, each)


def _refuse_odd_list(name: str, texts: Any) -> None:
    if isinstance(texts, list):
        for each in texts:
            if not isinstance(each, str):
                said = json.dumps(each)[:_LONGEST_REASON]
                raise SchemaError(f"this is no JSON Schema: a list of {name} has texts, and not {said}")


def _shallow(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part without its nested parts, which are checked separately: recursion stays shallow."""
    shallow = {name: each for name, each in part.items() if name not in _WORDS or not isinstance(each, str)}
    for name in (*_ALSO, *_WITHIN):
        if isinstance(shallow.get(name), dict):
            shallow[name] = True
    for name in (*_ALSO_EACH, "prefixItems"):
        if isinstance(shallow.get(name), list):
            # One schema stands for all of them.
            shallow[name] = [each for each in shallow[name] if not isinstance(each, dict | bool)] or (
                [True] * bool(shallow[name])
            )
    for name in (*_ALSO_BY_NAME, *_WITHIN_BY_NAME):
        if isinstance(shallow.get(name), dict):
            shallow[name] = {
                key: each for key, each in shallow[name].items() if not isinstance(each, dict | bool)
            }
    return shallow


def _reason(text: str) -> str | None:
    """Return why a part is not a schema; None if it is one."""
    return _kept_reason(text) if len(text) <= _LONGEST_KEPT else _found_reason(text)


def _found_reason(text: str) -> str | None:
    misfit = next(_META.iter_errors(json.loads(text)), None)
    return None if misfit is None else misfit.message[:_LONGEST_REASON]


# Strangers write them: what is kept is bounded by its size, and not by its number alone.
_kept_reason = lru_cache(maxsize=_KEPT)(_found_reason)


def _also(part: Mapping[str, Any]) -> Iterator[Any]:
    """Return the parts that hold for the same value as the whole."""
    yield from (part[name] for name in _ALSO if name in part)
    for name in _ALSO_EACH:
        yield from part.get(name, ())
    for name in _ALSO_BY_NAME:
        yield from part.get(name, {}).values()


def _target(reference: str, resolver: Any) -> Any:
    try:
        return resolver.lookup(reference)
    except Unresolvable as error:
        raise SchemaError(
            f"the $ref {reference[:_LONGEST_REASON]!r} leads nowhere within the schema, and nothing is fetched; "
            "put what it means under $defs"
        ) from error


def _refuse_circles(same_value: Mapping[int, list[int]]) -> None:
    lengths: dict[int, int] = {}
    try:
        for part in TopologicalSorter(same_value).static_order():
            lengths[part] = 1 + max((lengths[each] for each in same_value[part]), default=0)
    except CycleError as error:
        raise SchemaError("a $ref leads round in circles without going into the value") from error
    if max(lengths.values()) > _LONGEST_CHAIN:
        raise SchemaError(f"over {_LONGEST_CHAIN} schemas stand within one another for the same value")
