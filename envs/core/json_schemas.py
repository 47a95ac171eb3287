"""Validates JSON against untrusted schemas: nothing is fetched, and the work is bounded.

Errors of a schema are raised when a validator is made of it, and errors of a value when the value is validated. All
four callers share this module: verifiers of forms, kwargs of environments, tools, tools of MCP servers.
"""

import json
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from referencing import Registry

from rollgym.envs.core import patterns
from rollgym.envs.core.patterns import TooMuchWorkError
from rollgym.envs.core.schema_parts import SchemaError, checked_parts

_ITEMS_OF_A_LOOK = 50
"""How many items one look may go through."""

_VALUES_OF_A_LOOK = 50


@dataclass(frozen=True, slots=True)
class ReadSchema:
    """A schema that was looked at, and what is known of it by the identities of its parts.

    Attributes:
        schema: It.
        targets: Target of a part's `$ref`.
        allowed: The keys of what the `enum`, and of what the `const`, of a part allow.
    """

    schema: Mapping[str, Any]
    targets: Mapping[int, Any]
    allowed: Mapping[tuple[int, str], frozenset[Hashable]]


class Work:
    """How often something was looked at, within how many other looks one is, and how long patterns may still take.

    Args:
        read: The schema.
        most: Largest number of looks.
    """

    def __init__(self, read: ReadSchema, most: float) -> None:
        self.read = read
        self.depth = 0
        self._left = most
        self._seconds = patterns.SECONDS

    def look(self, looks: int = 1) -> None:
        """Count looks.

        Raises:
            TooMuchWorkError: There were too many.
        """
        self._left -= looks
        if self._left < 0:
            raise TooMuchWorkError("the schema takes too much work on this value")

    def compare(self, value: Any) -> None:
        """Count the visited parts of a value that is compared as a whole."""
        waiting = [value]
        size = 0
        while waiting:
            part = waiting.pop()
            if isinstance(part, Mapping | list | tuple):
                size += len(part)
                waiting.extend(part.values() if isinstance(part, Mapping) else part)
        self.look(size // _VALUES_OF_A_LOOK)

    def searches(self, pattern: str, text: str) -> bool:
        """Whether a pattern is found in a text. Raises like `patterns.searches`."""
        begun = time.monotonic()
        try:
            return patterns.searches(pattern, text, seconds=self._seconds)
        finally:
            self._seconds -= time.monotonic() - begun


_WORK: ContextVar[Work] = ContextVar("work")


def _unevaluated_items(
    validator: Any, _: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Refuse items that nothing has looked at and that do not fit `unevaluatedItems`."""
    if isinstance(instance, list):
        evaluated = _evaluated(validator, instance, schema)
        yield from _told("items", [each for index, each in enumerate(instance) if index not in evaluated])


def _unevaluated_properties(
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
    work = _WORK.get()
    found: set[str | int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, bool):
            work.look(1 + len(instance) // _ITEMS_OF_A_LOOK)
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
        yield _WORK.get().read.targets[id(part)]
    if isinstance(instance, dict):
        yield from (each for name, each in part.get("dependentSchemas", {}).items() if name in instance)
    for keyword in ("allOf", "oneOf", "anyOf"):
        yield from (each for each in part.get(keyword, ()) if _fits(validator, instance, each))
    if "if" in part:
        fits = _fits(validator, instance, part["if"])
        yield from (part["if"], part.get("then", True)) if fits else (part.get("else", True),)


def _fits(validator: Any, value: Any, part: Any) -> bool:
    return next(validator.descend(value, part), None) is None


_LARGEST_SCHEMA = 64 * 1024
_DEEPEST_VALUE = 200
# Python writes no whole number of more than 4,300 digits, and a message has to.
_LONGEST_NUMBER = 13_000
_MOST_LOOKS = 20_000
# Before Python says so: within the library's own libraries, that would be no exception of Python's.
_DEEPEST_LOOK = 120
_MOST_MISFITS = 100
_KEPT = 512
_LONGEST_KEPT = 4_000
# Limits of one validation: items that are visited, characters of error messages.
_PARTS_OF_A_LOOK = 10
_CHARACTERS_OF_A_LOOK = 100


class SchemaValidator:
    """A JSON Schema (2020-12), and the check of values against it.

    Numbers outside JSON (NaN and infinities) fit no schema, and true and false are not numbers. A value takes
    work that grows with its size, up to a bound; so do patterns, which have one limit of time together.

    Args:
        schema: The schema. It is copied.
        trusted: Whether the operator or an installed package wrote it, so that its size and its cost
            are theirs to choose.
        strict_integers: Whether to refuse 4.0 as an integer, as a Python constructor does; JSON Schema accepts it.
        match_patterns: Whether regular expressions are evaluated. If not, constraints on names that match no pattern
            are skipped, too.

    Raises:
        SchemaError: It is not a schema, too large, or has a `$ref` that leaves it, resolves to nothing, or is circular.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        *,
        trusted: bool = False,
        strict_integers: bool = False,
        match_patterns: bool = True,
    ) -> None:
        if not isinstance(schema, Mapping):
            raise SchemaError("a JSON Schema is needed, as a mapping")
        try:
            for _ in _beyond_json(schema):
                pass  # errors of numbers are reported below, with their place in the schema
            text = json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, TooMuchWorkError) as error:
            raise SchemaError(f"the schema cannot be read: {error}") from error
        if not trusted and len(text) > _LARGEST_SCHEMA:
            raise SchemaError(f"a schema has at most {_LARGEST_SCHEMA} characters, not {len(text)}")
        self._read = _read(text, match_patterns)
        dialect = (_STRICT if strict_integers else _BOUNDED)[match_patterns]
        # By itself, the library would fetch what a `$ref` names, wherever that is.
        self._validator = dialect(self._read.schema, registry=Registry())
        self._most_looks = math.inf if trusted else _MOST_LOOKS

    def fits(self, value: Any) -> bool:
        """Whether a value fits. Raises like `misfits`."""
        return next(self.misfits(value), None) is None

    def misfit(self, value: Any) -> jsonschema.ValidationError | None:
        """Return the most helpful of a value's errors; None if it fits. Raises like `misfits`."""
        best: jsonschema.ValidationError | None = best_match(islice(self.misfits(value), _MOST_MISFITS))
        return best

    def misfits(self, value: Any) -> Iterator[jsonschema.ValidationError]:
        """Return what of a value does not fit, one after another.

        Raises:
            TooMuchWorkError: The value is nested too deeply, or holding it against the schema takes too much work.
        """
        beyond = _beyond_json(value)
        first = next(beyond, None)
        if first is not None:
            yield first
            yield from beyond
            return
        work = Work(self._read, self._most_looks)
        misfits = self._validator.iter_errors(value)
        while True:
            # The caller may do other work between two misfits, and validate another value against another schema.
            token = _WORK.set(work)
            try:
                misfit = next(misfits, None)
            except RecursionError as error:
                raise TooMuchWorkError("the value is nested too deeply for the schema") from error
            finally:
                _WORK.reset(token)
            if misfit is None:
                return
            yield misfit


def _read(text: str, match_patterns: bool) -> ReadSchema:
    """Look at a schema, which takes longer than holding most values against it."""
    return (_kept if len(text) <= _LONGEST_KEPT else _looked_at)(text, match_patterns)


def _looked_at(text: str, match_patterns: bool) -> ReadSchema:
    schema = json.loads(text)
    parts, targets = checked_parts(schema)
    if match_patterns:
        _check_patterns(parts)
    allowed: dict[tuple[int, str], frozenset[Hashable]] = {
        (id(part), name): frozenset(map(_key, part["enum"] if name == "enum" else [part["const"]]))
        for part in parts
        for name in ("enum", "const")
        if name in part
    }
    return ReadSchema(schema, targets, allowed)


# What is read takes up to forty times the memory of the text, and a server lives long.
_kept = lru_cache(maxsize=_KEPT)(_looked_at)


def _check_patterns(parts: Iterable[Mapping[str, Any]]) -> None:
    try:
        for part in parts:
            for pattern in (
                *part.get("patternProperties", ()),
                *([part["pattern"]] if "pattern" in part else ()),
            ):
                patterns.check_pattern(pattern)
    except ValueError as error:
        raise SchemaError(f"the schema has a pattern that cannot be used: {error}") from error
    if all(any(name in part for part in parts) for name in ("patternProperties", "unevaluatedProperties")):
        raise SchemaError(
            "unevaluatedProperties are not taken where there are patternProperties; say additionalProperties instead"
        )


def _beyond_json(value: Any) -> Iterator[jsonschema.ValidationError]:
    """Yield the numbers that are outside JSON, or that cannot be printed.

    Raises:
        TooMuchWorkError: It is nested so deeply that a recursive walk would overflow Python's stack.
    """
    # One path, of where the walk is: a path for each of many values deep within others takes more memory than they do.
    path: list[Any] = [None]
    levels: list[Iterator[tuple[Any, Any]]] = [iter([(None, value)])]
    while levels:
        for path[-1], part in levels[-1]:
            if isinstance(part, str):
                continue
            if isinstance(part, float):
                if not math.isfinite(part):
                    yield jsonschema.ValidationError("is not finite", path=tuple(path[1:]))
            elif isinstance(part, int):
                if part.bit_length() > _LONGEST_NUMBER:
                    yield jsonschema.ValidationError("is a number of too many digits", path=tuple(path[1:]))
            elif isinstance(part, Mapping | list | tuple):
                if len(levels) > _DEEPEST_VALUE:
                    raise TooMuchWorkError(f"it is nested more than {_DEEPEST_VALUE} deep")
                levels.append(iter(part.items() if isinstance(part, Mapping) else enumerate(part)))
                path.append(None)
                break
        else:
            levels.pop()
            path.pop()


_Keyword = Callable[[Any, Any, Any, Any], Iterable[jsonschema.ValidationError] | None]


def _counted(name: str, keyword: _Keyword) -> _Keyword:
    """Return a keyword that counts what looking at it brings with it."""

    def look(validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
        work = _WORK.get()
        size = len(instance) if isinstance(instance, list | dict) else 0
        looks = 1 + size // _ITEMS_OF_A_LOOK
        if isinstance(part, list | dict) and name not in ("enum", "const"):
            looks += len(part) // _PARTS_OF_A_LOOK
        work.look(looks)
        if work.depth == _DEEPEST_LOOK:
            raise RecursionError
        work.depth += 1
        try:
            for misfit in keyword(validator, part, instance, schema) or ():
                if misfit.validator not in validator.VALIDATORS:
                    # It was found here, and its message, which may be as long as what it is about, was written.
                    work.look(len(misfit.message) // _CHARACTERS_OF_A_LOOK)
                yield misfit
        finally:
            work.depth -= 1

    return look


def _ref(validator: Any, _: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Follow a reference to its known target; the library would search the whole schema at each validation."""
    yield from validator.descend(instance, _WORK.get().read.targets[id(schema)])


def _enum(_: Any, allowed: list[Any], instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if not _is_allowed("enum", instance, schema):
        yield jsonschema.ValidationError(f"{instance!r} is not one of {allowed!r}")


def _const(_: Any, const: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if not _is_allowed("const", instance, schema):
        yield jsonschema.ValidationError(f"{const!r} was expected")


def _is_allowed(name: str, instance: Any, schema: Any) -> bool:
    work = _WORK.get()
    work.compare(instance)
    return _key(instance) in work.read.allowed[id(schema), name]


def _multiple_of(_: Any, unit: float, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Divide numbers as they are written: 19.99 is a multiple of 0.01, which it is not to floating point."""
    if not isinstance(instance, int | float) or isinstance(instance, bool):
        return
    if (_exact(instance) / _exact(unit)).denominator != 1:
        yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {unit}")


def _exact(number: float) -> Fraction:
    return Fraction(number) if isinstance(number, int) else Fraction(repr(float(number)))


def _unique_items(_: Any, unique: bool, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """Visit each item once: the library compares each with all others if they cannot be sorted."""
    if not unique or not isinstance(instance, list):
        return
    _WORK.get().compare(instance)
    if len(set(map(_key, instance))) < len(instance):
        yield jsonschema.ValidationError(f"{instance!r} has non-unique elements")


def _key(value: Any) -> Hashable:
    """Return a key that is equal for equal JSON values: 1 equals 1.0, and differs from true.

    Numbers are texts in the key, since an attacker cannot choose texts with colliding hashes.
    """
    if isinstance(value, list | tuple):
        return "list", *map(_key, value)
    if isinstance(value, Mapping):
        return "object", frozenset((name, _key(part)) for name, part in value.items())
    if isinstance(value, int | float) and not isinstance(value, bool):
        whole = isinstance(value, int) or value.is_integer()
        return "number", hex(int(value)) if whole else float(value).hex()
    return type(value).__name__, value


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and not _WORK.get().searches(pattern, instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, parts: Mapping[str, Any], instance: Any, _: Any
) -> Iterator[jsonschema.ValidationError]:
    if not isinstance(instance, dict):
        return
    work = _WORK.get()
    for pattern, part in parts.items():
        for name, value in instance.items():
            work.look()
            if work.searches(pattern, name):
                yield from validator.descend(value, part, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, part: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[jsonschema.ValidationError]:
    """Hold names that match no pattern against `additionalProperties`; the library would match by Python's engine."""
    if "patternProperties" not in schema:
        yield from _OWN["additionalProperties"](validator, part, instance, schema) or ()
        return
    if not isinstance(instance, dict):
        return
    work = _WORK.get()
    for name, value in instance.items():
        if name in schema.get("properties", {}):
            continue
        work.look(len(schema["patternProperties"]))
        if any(work.searches(pattern, name) for pattern in schema["patternProperties"]):
            continue
        if part is False:
            yield jsonschema.ValidationError(
                f"Additional properties are not allowed ({name!r} was unexpected)"
            )
        else:
            yield from validator.descend(value, part, path=name)


def _left_out(_: Any, __: Any, ___: Any, ____: Any) -> None:
    """Skip a keyword: report no error."""


def _additional_to_no_pattern(
    validator: Any, part: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterable[jsonschema.ValidationError] | None:
    if "patternProperties" in schema:
        return None
    return _OWN["additionalProperties"](validator, part, instance, schema)


def _is_strict_integer(_: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dialect(keywords: dict[str, _Keyword], *, strict: bool) -> Any:
    checker = Draft202012Validator.TYPE_CHECKER
    return extend(  # type: ignore[no-untyped-call]
        Draft202012Validator,
        {name: _counted(name, keyword) for name, keyword in (_OWN | _BOUND | keywords).items()},
        type_checker=checker.redefine("integer", _is_strict_integer) if strict else checker,
    )


_OWN: dict[str, _Keyword] = dict(Draft202012Validator.VALIDATORS)
_BOUND: dict[str, _Keyword] = {
    "$ref": _ref,
    "const": _const,
    "enum": _enum,
    "multipleOf": _multiple_of,
    "uniqueItems": _unique_items,
    "unevaluatedItems": _unevaluated_items,
    "unevaluatedProperties": _unevaluated_properties,
}
_MATCHED: dict[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
_UNMATCHED: dict[str, _Keyword] = {
    "pattern": _left_out,
    "patternProperties": _left_out,
    "additionalProperties": _additional_to_no_pattern,
    "unevaluatedProperties": _left_out,
}
_BOUNDED = {matched: _dialect(_MATCHED if matched else _UNMATCHED, strict=False) for matched in (True, False)}
_STRICT = {matched: _dialect(_MATCHED if matched else _UNMATCHED, strict=True) for matched in (True, False)}
