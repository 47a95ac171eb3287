"""Tools that an environment declares in `info`, and calls of them; read and written by `rollgym.clients.replies`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DEFAULT_CALL_FORMAT = "hermes"
"""The format of an environment that names none."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: The name of the tool.
        arguments: The values, by the names of its parameters.
        id: The policy's id of the call; empty in formats without ids.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolDeclaration:
    """A tool of an environment.

    Attributes:
        name: The name that calls use.
        description: Its description for the model.
        parameters: JSON Schema of its arguments, of type `object`.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def as_openai(self) -> dict[str, Any]:
        """Return the declaration as OpenAI's chat API takes it in `tools`."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


def call_format_of(info: Mapping[str, Any]) -> str:
    """Return the name of the format in which an environment reads calls; Hermes if it names none."""
    return str(info.get("call_format", DEFAULT_CALL_FORMAT))


def tool_results(info: Mapping[str, Any]) -> list[str]:
    """Return the results of the calls of a step, in order, without the marks of the format.

    Args:
        info: The `info` of a step.
    """
    return [text for role, text in _messages(info) if role == "tool"]


def other_messages(info: Mapping[str, Any]) -> list[str]:
    """Return the environment's messages of a step other than the results of calls."""
    return [text for role, text in _messages(info) if role != "tool"]


def answer_text(observation: str, info: Mapping[str, Any]) -> str:
    """Return the text that one tool call returns to the model: the results, or else the observation."""
    messages = _messages(info)
    return "\n".join(text for _, text in messages) if messages else observation


def _messages(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of the messages of a step; empty if one of them is not a text."""
    messages = info.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    found = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), str):
            return []
        found.append((str(message.get("role")), content))
    return found
