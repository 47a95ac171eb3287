"""JSON by a schema that a stranger wrote: nothing is fetched, and the work is bounded."""

import itertools
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NoReturn

import jsonschema
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from envs.core.replies import unfenced
from envs.verifiers import patterns
from envs.verifiers.formats.reply import Reply

_LARGEST_SCHEMA = 64 * 1024
_LONGEST_JSON = 200_000
_MOST_LOOKS = 20_000
_KEPT = 256
# Their regular expressions would run in Python's own engine, without a limit.
_REFUSED = frozenset({"patternProperties", "$dynamicRef"})
_NAMES = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


def schema(value: Any) -> Mapping[str, Any]:
    """Read a JSON Schema (2020-12)."""
    if not isinstance(value, Mapping):
        raise ValueError("a JSON Schema is needed, as a mapping")
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("the schema cannot be read") from error
    if len(text) > _LARGEST_SCHEMA:
        raise ValueError(f"a schema has at most {_LARGEST_SCHEMA} characters, not {len(text)}")
    return _checked(text)


@lru_cache(maxsize=_KEPT)
def _checked(text: str) -> Mapping[str, Any]:
    """Return a schema that was looked at, which takes longer than holding most responses against it."""
    schema: Mapping[str, Any] = json.loads(text)
    try:
        Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"this is no JSON Schema: {error.message[:200]}") from error
    except RecursionError as error:
        raise ValueError("the schema cannot be read") from error
    bounded: Mapping[str, Any] = _bounded(schema)
    return bounded


def _bounded(part: Any, *, names: bool = False) -> Any:
    """Return a schema as it is used: without `$schema`, by which its parts would pick validators that count nothing.

    Raises:
        ValueError: It has what cannot be bounded.
    """
    if isinstance(part, list):
        return [_bounded(each) for each in part]
    if not isinstance(part, Mapping):
        return part
    if names:
        return {name: _bounded(each) for name, each in part.items()}
    for name in _REFUSED & part.keys():
        raise ValueError(f"{name} is not taken in the schemas of tasks")
    return {
        name: each if name in _VALUES else _bounded(each, names=name in _NAMES)
        for name, each in part.items()
        if name != "$schema"
    }


def json_schema(reply: Reply, schema: Mapping[str, Any]) -> float:
    """Whether what is said, fenced or not, is JSON that a schema allows.

    Raises:
        ValueError: A `$ref` of the schema leads nowhere within it.
        TooMuchWorkError: Holding one against the other takes too much work.
    """
    if len(reply.spoken) > _LONGEST_JSON:
        return 0.0
    try:
        value = json.loads(unfenced(reply.spoken), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    token = _LOOKS.set(itertools.count(1))
    try:
        return float(_FRUGAL(schema, registry=Registry()).is_valid(value))
    except (Unresolvable, RecursionError) as error:
        raise ValueError(
            "a $ref of the schema leads nowhere, or round in circles; nothing is fetched"
        ) from error
    finally:
        _LOOKS.reset(token)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _counted(keyword: Any) -> Any:
    def look(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if next(_LOOKS.get()) > _MOST_LOOKS:
            raise patterns.TooMuchWorkError("the schema takes too much work on this response")
        yield from keyword(validator, part, instance, schema) or ()

    return look


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not patterns.searches(pattern, instance):
        yield jsonschema.ValidationError("does not match")


_LOOKS: ContextVar[Iterator[int]] = ContextVar("looks")
_FRUGAL = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {name: _counted(keyword) for name, keyword in Draft202012Validator.VALIDATORS.items()}
    | {"pattern": _pattern},
)
