"""A tool: what a policy may call, declared by a JSON schema."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    Schemas,
)
from rollgym.envs.core.json_schemas import SchemaValidator
from rollgym.envs.core.patterns import TooMuchWorkError
from rollgym.envs.core.schema_parts import SchemaError

_MAX_REASON = 300
# Each value that is held against a schema takes its microseconds.
_MOST_VALUES = 4_000
_MOST_SHOWN = 100_000


class ToolError(Exception):
    """A tool cannot do what it was asked; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared tool.

    Attributes:
        name: That it is called by.
        description: Its effect, described for the policy.
        parameters: JSON Schema of its arguments, an object.
        function: Does it, given the arguments by name. It returns text, or what JSON can hold, and raises `ToolError`
            if it cannot do what it was asked.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] = field(repr=False)

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates and APIs take it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call.

    Attributes:
        text: For the policy.
        error: Whether the tool could not do it.
    """

    text: str
    error: bool = False


def shortened_result(text: str) -> str:
    """Return a result as a policy is shown it: of one that is too long for any context, the begin and the end."""
    left_out = len(text) - _MOST_SHOWN
    if left_out <= 0:
        return text
    half = _MOST_SHOWN // 2
    return f"{text[:half]}\n[{left_out} characters are left out]\n{text[-half:]}"


class Toolbox:
    """A set of tools, by name.

    Args:
        tools: Each with a name of its own.

    Raises:
        ValueError: If two tools have one name, or the parameters of one are not a JSON Schema.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ValueError("two tools have the same name")
        self.schemas: Schemas = {tool.name: tool.parameters for tool in tools}
        self._validators = {tool.name: _validator(tool) for tool in tools}

    def described(self) -> list[dict[str, Any]]:
        """Return all tools as chat templates and APIs take them."""
        return [tool.schema() for tool in self._tools.values()]

    def faults(self, calls: Sequence[ToolCall]) -> list[str | None]:
        """Return for each call of a reply why it makes no sense; None if it does.

        Calls with more values than can be looked at while others wait are faults, all of them.
        """
        if _has_more_values(calls, _MOST_VALUES):
            return [f"the arguments of a reply hold at most {_MOST_VALUES} values together"] * len(calls)
        return [self.fault(call) for call in calls]

    def fault(self, call: ToolCall) -> str | None:
        """Return why a call is invalid: an unknown tool, or arguments that do not fit; None if it is valid."""
        if call.name not in self._tools:
            return f"there is no tool {call.name[:100]!r}; the tools are {', '.join(self._tools)}"
        try:
            misfit = self._validators[call.name].misfit(call.arguments)
        except TooMuchWorkError as error:
            return f"{call.name}: the arguments cannot be held against its schema: {error}"
        if misfit is None:
            return None
        where = ".".join(str(part) for part in misfit.absolute_path)
        return f"{call.name}: {f'{where}: ' if where else ''}{misfit.message}"[:_MAX_REASON]

    def run(self, call: ToolCall) -> ToolResult:
        """Run a call that has no fault.

        Raises:
            TypeError: If the tool returns what is neither text nor JSON.
        """
        try:
            value = self._tools[call.name].function(**call.arguments)
        except ToolError as error:
            return ToolResult(f"error: {error}", error=True)
        if isinstance(value, str):
            return ToolResult(value)
        try:
            return ToolResult(json.dumps(value, ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the tool {call.name!r} must return text, or what JSON can hold: {error}"
            ) from error


def _validator(tool: Tool) -> SchemaValidator:
    try:
        return SchemaValidator(tool.parameters)
    except SchemaError as error:
        raise ValueError(f"the parameters of the tool {tool.name!r} cannot be used: {error}") from error


def _has_more_values(calls: Sequence[ToolCall], most: int) -> bool:
    left: list[Any] = [call.arguments for call in calls]
    found = 0
    while left:
        value = left.pop()
        if isinstance(value, Mapping | list | tuple):
            found += len(value)
            if found > most:
                return True
            left.extend(value.values() if isinstance(value, Mapping) else value)
    return False


def tool_parameters(required: Sequence[str] = (), /, **properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments; what is not named is refused.

    Args:
        required: Names of those that must be given.
        properties: A schema for each argument.
    """
    return {
        "type": "object",
        "properties": {name: dict(schema) for name, schema in properties.items()},
        "required": list(required),
        "additionalProperties": False,
    }


def text_of_tools(described: Sequence[Mapping[str, Any]]) -> str:
    """Return tools as an instruction shows them: one JSON object on each line."""
    return "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in described)
