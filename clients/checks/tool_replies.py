"""Replies that call the tools of an environment, with arguments drawn from the tools' schemas."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from rollgym.clients.checks.report import shortened
from rollgym.clients.checks.schema_values import SchemaNote, SchemaValues
from rollgym.clients.protocol.tool_calls import CALL_FORMATS, DEFAULT_CALL_FORMAT, ToolCall
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.clients.replies.formats.table import written_calls

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
        if self.tools and self.call_format not in CALL_FORMATS:
            known = ", ".join(CALL_FORMATS)
            self.notes.append(
                f"calls in the format {self.call_format[:40]!r} cannot be written; known are {known}"
            )

    def calls(self, name: str) -> Iterator[ToolCall]:
        """Give calls of a tool: ordinary ones first, then odd ones that fit its schema all the same.

        Those that the format has no form for are left out.
        """
        if self.call_format not in CALL_FORMATS:
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
        if self.call_format not in CALL_FORMATS:
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
    return [name for name in formats if name in CALL_FORMATS]


def described_call(call: ToolCall) -> str:
    """Return a call for a message, cut if it is long."""
    arguments = ", ".join(f"{name}={shortened(value, _SHOWN)}" for name, value in call.arguments.items())
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
