"""Replies that call the tools of an environment, with arguments drawn from the tools' schemas.

The values that fit a schema are ordinary ones, and odd ones at its edges, as careless policies send them. They are
bounded on purpose: every value is small, and keywords that need a solver are refused with a `SchemaNote`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from rollgym.clients.checks.report import shortened_repr
from rollgym.clients.protocol.tool_calls import DEFAULT_CALL_FORMAT, ToolCall
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.clients.replies.formats.table import FORMATS, written_calls

Schema = Mapping[str, Any]

_DEEPEST = 6
_MOST_ITEMS = 40
_MOST_WORK = 20_000
_LONG_TEXT = 10_000
_WORDS = ("alpha", "Berlin", "42", "order-17", "Anna", "2031-03-14")
_ODD_TEXTS = (
    *("", " ", "nonsense", "'; DROP TABLE users; --", 'a "quoted" word', "50% {0} %s \\", "-1", "null"),
    *("漢字😀", "\x00", "line\nline", "<|im_end|></tool_call>", "../../etc/passwd", "x" * _LONG_TEXT),
)
_ODD_INTEGERS = (0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30)
_ODD_NUMBERS = (0.0, -0.5, 0.1, 1e-300, 1e300, -1e300, 10**18)
_FORMATS = {
    "date": "2031-03-14",
    "date-time": "2031-03-14T15:09:26Z",
    "time": "15:09:26Z",
    "email": "anna@example.org",
    "uri": "https://example.org/a",
    "uuid": "6f2c1f0e-8f0b-4a53-9f0c-0d6f6c1f2a3b",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
}
_REFUSED = (
    *("not", "if", "patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "contains"),
    *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "dependencies"),
)


class SchemaNote(ValueError):  # noqa: N818 - no error of the schema: it is more than this module draws from
    """No values are drawn from a schema; the message says why."""


class SchemaValues:
    """Draws values that fit one schema.

    Args:
        schema: The schema, which local references (`#/...`) are looked up in.
        seed: The seed of all random draws.
        words: Texts that ordinary values may be, such as those of an observation.
    """

    def __init__(self, schema: Schema, seed: int, words: Sequence[str] = ()) -> None:
        self._root = schema
        self._random = random.Random(seed)
        self._words = tuple(words) or _WORDS
        self._work = _MOST_WORK

    def ordinary(self, *, optional: bool = True) -> Any:
        """Return an ordinary value.

        Args:
            optional: Whether properties that are not required may be in it.

        Raises:
            SchemaNote: If the schema is more than this class draws from.
        """
        return self._ordinary(self._root, _DEEPEST, optional)

    def odd(self) -> Iterator[Any]:
        """Give odd values, each with one part at an edge of the schema and the others ordinary.

        Raises:
            SchemaNote: As of `ordinary`.
        """
        yield from self._odd(self._root, _DEEPEST)

    # -- ordinary values -------------------------------------------------------------------------------------------

    def _ordinary(self, schema: Any, depth: int, optional: bool) -> Any:
        schema = self._plain(schema, depth)
        if "const" in schema:
            return schema["const"]
        for keyword in ("enum", "examples"):
            if isinstance(listed := schema.get(keyword), list) and listed:
                return self._random.choice(listed)
        if ways := _ways(schema):
            return self._ordinary(ways[0], depth - 1, optional)
        match _type(schema):
            case "object":
                return self._object(schema, depth, optional)
            case "array":
                low, high = _bounds(schema, "Items", 1, 3)
                return [
                    self._ordinary(part, depth - 1, optional)
                    for part in _items(schema, max(low, min(1, high)))
                ]
            case "integer" | "number" as kind:
                return _number(schema, self._random.randint(1, 9), whole=kind == "integer")
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
        return self._text(schema)

    def _object(self, schema: Schema, depth: int, optional: bool) -> dict[str, Any]:
        required = schema.get("required", ())
        drawn = {}
        for name, part in _properties(schema).items():
            if name not in required and not (optional and self._random.random() < 0.7):
                continue
            try:
                drawn[name] = self._ordinary(part, depth - 1, optional)
            except SchemaNote:
                if name in required:
                    raise
        return drawn

    def _text(self, schema: Schema) -> str:
        choices = [_FORMATS[schema["format"]]] if schema.get("format") in _FORMATS else list(self._words)
        self._random.shuffle(choices)
        low, high = _bounds(schema, "Length", 0, _LONG_TEXT)
        fitting = [text for text in choices if low <= len(text) <= high] or [
            (choices[0] * low)[:high][: max(low, 1)]
        ]
        if (pattern := schema.get("pattern")) is None:
            return fitting[0]
        for text in (*fitting, *_WORDS, *_FORMATS.values(), "A", "a", "1", "12345", "AB-123", "a_b"):
            if low <= len(text) <= high and re.search(pattern, text):
                return text
        raise SchemaNote(f"no text is known that fits the pattern {pattern!r}; give the schema `examples`")

    # -- odd values ------------------------------------------------------------------------------------------------

    def _odd(self, schema: Any, depth: int) -> Iterator[Any]:
        schema = self._plain(schema, depth)
        if "const" in schema:
            return
        if isinstance(listed := schema.get("enum"), list):
            yield from listed[:_MOST_ITEMS]
            return
        if ways := _ways(schema):
            for way in ways:
                yield self._ordinary(way, depth - 1, True)
                yield from self._odd(way, depth - 1)
            return
        match _type(schema):
            case "object":
                yield from self._odd_objects(schema, depth)
            case "array":
                yield from self._odd_arrays(schema, depth)
            case "integer":
                yield from _edges(schema, _ODD_INTEGERS, whole=True)
            case "number":
                yield from _edges(schema, _ODD_NUMBERS, whole=False)
            case "boolean":
                yield from (True, False)
            case "string" if not {"pattern", "format"} & schema.keys():
                low, high = _bounds(schema, "Length", 0, _LONG_TEXT)
                yield from dict.fromkeys((text * (low or 1))[:high].ljust(low) for text in _ODD_TEXTS)

    def _odd_objects(self, schema: Schema, depth: int) -> Iterator[Any]:
        yield self._ordinary(schema, depth, False)
        for name, part in _properties(schema).items():
            # Properties that cannot be drawn are left out if they are optional: `_object` handles required ones.
            with suppress(SchemaNote):
                for value in self._odd(part, depth - 1):
                    yield self._object(schema, depth, True) | {name: value}
        if schema.get("additionalProperties", True) is not False:
            yield self._object(schema, depth, True) | {"unexpected": "extra"}

    def _odd_arrays(self, schema: Schema, depth: int) -> Iterator[Any]:
        low, high = _bounds(schema, "Items", 0, _MOST_ITEMS)
        for count in sorted({low, high}):
            yield [self._ordinary(part, depth - 1, True) for part in _items(schema, count)]
        if high == 0:
            return
        (first,) = _items(schema, 1)
        for value in self._odd(first, depth - 1):
            yield [
                value,
                *(self._ordinary(part, depth - 1, True) for part in _items(schema, max(low, 1))[1:]),
            ]

    # -- schemas ---------------------------------------------------------------------------------------------------

    def _plain(self, schema: Any, depth: int) -> Schema:
        """Return a schema without a reference and `allOf`."""
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            raise SchemaNote(f"{schema!r} admits no value")
        self._work -= 1
        if self._work < 0:
            raise SchemaNote("it is too large")
        if depth <= 0:
            raise SchemaNote(f"it is nested more than {_DEEPEST} deep")
        if refused := next((keyword for keyword in _REFUSED if keyword in schema), None):
            raise SchemaNote(f"values for the keyword {refused!r} are not drawn")
        if "$ref" in schema:
            rest = {name: value for name, value in schema.items() if name != "$ref"}
            return self._plain({**self._referred(schema["$ref"]), **rest}, depth - 1)
        if "allOf" in schema:
            return self._plain(
                _merged(schema, [self._plain(each, depth - 1) for each in schema["allOf"]]), depth
            )
        return schema

    def _referred(self, reference: Any) -> Schema:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise SchemaNote(f"the reference {reference!r} is not local")
        found: Any = self._root
        for part in filter(None, reference[1:].split("/")):
            found = (
                found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        if not isinstance(found, Mapping):
            raise SchemaNote(f"the reference {reference!r} leads nowhere")
        return found


def _ways(schema: Schema) -> list[Any]:
    """Return the schemas of `anyOf`, `oneOf` or several types, each merged with their common constraints."""
    for keyword in ("anyOf", "oneOf"):
        if isinstance(ways := schema.get(keyword), list):
            rest = {name: value for name, value in schema.items() if name != keyword}
            return [{**rest, **way} if isinstance(way, Mapping) else way for way in ways]
    if isinstance(types := schema.get("type"), list):
        return [{**schema, "type": each} for each in types]
    return []


def _type(schema: Schema) -> str:
    if isinstance(kind := schema.get("type"), str):
        return kind
    if "properties" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    return "number" if {"minimum", "maximum", "multipleOf"} & schema.keys() else "string"


def _properties(schema: Schema) -> Mapping[str, Any]:
    properties = schema.get("properties", {})
    required: dict[str, Any] = {name: {} for name in schema.get("required", ()) if name not in properties}
    return {**properties, **required}


def _items(schema: Schema, count: int) -> list[Any]:
    """Return the schemas of the first items of an array."""
    rest = schema.get("items", {})
    rest = {} if rest is False else rest
    return [*schema.get("prefixItems", ()), *[rest] * count][: max(count, 0)]


def _bounds(schema: Schema, what: str, low: int, high: int) -> tuple[int, int]:
    """Return the least and largest length; `high` replaces a missing bound."""
    least = max(low, int(schema.get(f"min{what}", low)))
    most = int(schema.get(f"max{what}", max(high, least)))
    if least > _LONG_TEXT:
        raise SchemaNote(f"min{what} is {least}")
    return min(least, most), min(most, max(high, least))


def _limits(schema: Schema) -> tuple[float, float]:
    low, high = schema.get("minimum", -float("inf")), schema.get("maximum", float("inf"))
    step = 1 if _type(schema) == "integer" else 1e-9
    low = max(low, schema.get("exclusiveMinimum", low - step) + step)
    return low, min(high, schema.get("exclusiveMaximum", high + step) - step)


def _number(schema: Schema, value: float, *, whole: bool) -> float:
    low, high = _limits(schema)
    value = min(max(value, low), high)
    if step := schema.get("multipleOf"):
        value = step * -(-value // step)
    if whole and value != float("inf"):
        value = int(value)
    if not low <= value <= high:
        raise SchemaNote("no number between its bounds was found")
    return value


def _edges(schema: Schema, odd: Sequence[float], *, whole: bool) -> Iterator[float]:
    low, high = _limits(schema)
    bounds = [bound for bound in (low, high) if abs(bound) != float("inf")]
    step = schema.get("multipleOf")
    for value in dict.fromkeys([*bounds, *odd]):
        if low <= value <= high and not (step and value % step):
            yield int(value) if whole else value


def _merged(schema: Schema, parts: Sequence[Schema]) -> Schema:
    """Return one schema for all of `allOf`; of two that say the same keyword, the later one counts."""
    merged: dict[str, Any] = {}
    for part in (*parts, {name: value for name, value in schema.items() if name != "allOf"}):
        properties = {**merged.get("properties", {}), **part.get("properties", {})}
        required = [*merged.get("required", ()), *part.get("required", ())]
        merged |= part
        if properties:
            merged |= {"properties": properties, "required": required}
    return merged


_ORDINARY_CALLS = 3
_MOST_ODD_CALLS = 60
_SHOWN = 100
# Errors of reading an invalid schema.
_NOT_A_SCHEMA = (TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class ToolReplies:
    """Writes calls of the tools that an environment offers.

    Args:
        info: The info of a reset. `info["tools"]` has the tools as chat APIs take them, `info["call_format"]` the
            format of calls.
        seed: The seed of the arguments.

    Attributes:
        tools: The schema of each tool's arguments, by name; empty if there are none.
        call_format: The format's name.
        notes: Why some tools are not called, a sentence each.
    """

    def __init__(self, info: Mapping[str, Any], seed: int = 0) -> None:
        self.tools = _offered_tools(info)
        self.call_format = str(info.get("call_format") or DEFAULT_CALL_FORMAT)
        self.notes: list[str] = []
        self._seed = seed
        if self.tools and self.call_format not in FORMATS:
            known = ", ".join(FORMATS)
            self.notes.append(
                f"calls in the format {self.call_format[:40]!r} cannot be written; known are {known}"
            )

    def calls(self, name: str) -> Iterator[ToolCall]:
        """Give calls of a tool: ordinary ones first, then odd ones that fit its schema all the same.

        Those that the format has no form for are left out.
        """
        if self.call_format not in FORMATS:
            return
        refused: UnwritableCallError | None = None
        found = False
        for call in self._drawn(name):
            try:
                self.write(call)
            except UnwritableCallError as error:
                refused = error
            else:
                found = True
                yield call
        if refused is not None and not found:
            self.notes.append(f"{name}: {refused}")

    def _drawn(self, name: str) -> Iterator[ToolCall]:
        values = SchemaValues(self.tools[name], self._seed)
        try:
            for optional in (True, False, True)[:_ORDINARY_CALLS]:
                yield _call(name, values.ordinary(optional=optional))
            for arguments in islice(values.odd(), _MOST_ODD_CALLS):
                yield _call(name, arguments)
        except SchemaNote as note:
            self.notes.append(f"{name}: {note}")
        except _NOT_A_SCHEMA as error:
            self.notes.append(f"{name}: its parameters cannot be read as a JSON Schema: {error}")

    def rounds(self) -> Iterator[ToolCall]:
        """Give the calls of all tools in turns, so that each tool is called before time runs out."""
        waiting = [self.calls(name) for name in self.tools]
        while waiting:
            left = []
            for calls in waiting:
                if (call := next(calls, None)) is not None:
                    yield call
                    left.append(calls)
            waiting = left

    def write(self, call: ToolCall) -> str:
        """Return the reply that makes a call.

        Raises:
            UnwritableCallError: The format has no form for it.
        """
        return written_calls(self.call_format, [call], schemas=self.tools)

    def draw(self, generator: random.Random, words: Sequence[str] = ()) -> str | None:
        """Return a reply that calls a tool at random with ordinary arguments; None if none can be called.

        Args:
            generator: Draws the tool and its arguments.
            words: Texts that arguments may be.
        """
        if self.call_format not in FORMATS:
            return None
        name = generator.choice(sorted(self.tools))
        try:
            return self.write(
                _call(name, SchemaValues(self.tools[name], generator.getrandbits(32), words).ordinary())
            )
        except _NOT_A_SCHEMA:
            return None


def call_formats(kwargs_schema: Mapping[str, Any] | None) -> Sequence[str]:
    """Return the formats that the kwarg `call_format` of an environment may be; none if it has no such kwarg."""
    properties = (kwargs_schema or {}).get("properties", {})
    formats = properties.get("call_format", {}).get("enum", ())
    return [name for name in formats if name in FORMATS]


def described_call(call: ToolCall) -> str:
    """Return a call for a message, cut if it is long."""
    arguments = ", ".join(f"{name}={shortened_repr(value, _SHOWN)}" for name, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _call(name: str, arguments: Any) -> ToolCall:
    if not isinstance(arguments, Mapping):
        raise SchemaNote("its parameters are no object")
    return ToolCall(name, arguments)


def _offered_tools(info: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    listed = info.get("tools")
    offered: dict[str, Mapping[str, Any]] = {}
    for tool in listed if isinstance(listed, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str):
            schema = function.get("parameters")
            # A tool without parameters takes an empty object.
            offered[name] = {"type": "object", **(schema if isinstance(schema, Mapping) else {})}
    return offered
