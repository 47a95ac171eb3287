"""A reply of the policy as agents receive it: thinking, content, and calls of tools.

The readers that environments use (`rollgym.clients.replies`) parse it, and it is as lenient as inference servers are.
What is not a proper tool call stays content, so that the agent can tell the policy what was wrong.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rollgym.clients.protocol import tool_calls
from rollgym.clients.replies.formats.calls import CallFormat, Schemas
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.clients.replies.thinking import split_thinking

ToolFormat = Literal["hermes", "qwen-xml", "llama", "mistral"]
"""How a family of models writes calls of tools."""
FAMILIES: Mapping[ToolFormat, CallFormat] = {name: FORMATS[name] for name in get_args(ToolFormat)}
"""The formats of families whose chat templates write calls."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: The tool.
        arguments: JSON text, as the API has it.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, taken apart.

    Attributes:
        content: The visible text.
        reasoning: The thinking; None if it does not think.
        calls: The tool calls.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


def read_reply(
    text: str,
    tool_format: ToolFormat | None = None,
    *,
    begun: bool = False,
    schemas: Schemas | None = None,
    begins: tuple[str, ...] = (),
) -> Reply:
    """Parse a reply.

    Args:
        text: All of it, with the marks of its family and without the closing of the turn.
        tool_format: The format of tool calls; None if calls are not parsed.
        begun: Whether the prompt has opened the thinking already.
        schemas: Schemas of the offered tools, for formats that have no types of their own.
        begins: How a reply with calls begins, if a reply that begins otherwise has none.
    """
    reasoning, said = split_thinking(text, begun=begun)
    if tool_format is None or (begins and not said.startswith(begins)):
        return Reply(said, reasoning)
    form = FAMILIES[tool_format]
    reading = form.read(said, schemas or {}, strict=False)
    if not reading.calls or (form.whole and reading.faults):
        return Reply(said, reasoning)
    # What is said beside calls comes without the blanks that lead over to them.
    return Reply(reading.remaining.rstrip(), reasoning, tuple(map(_as_text, reading.calls)))


def has_mark(text: str) -> bool:
    """Whether a text contains the opening of a call, of any family."""
    return any(form.mark in text for form in FAMILIES.values())


def format_of_template(template: str) -> ToolFormat:
    """Return how the family of a chat template writes calls; Hermes if it shows none."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return "qwen-xml"
    if "<tool_call>" in template:
        return "hermes"
    return "llama" if "<|start_header_id|>" in template or "<|python_tag|>" in template else "hermes"


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of the tools that an agent offers, by their names."""
    declared = [tool["function"] for tool in tools]
    return {
        each["name"]: each["parameters"] for each in declared if isinstance(each.get("parameters"), Mapping)
    }


def _as_text(call: tool_calls.ToolCall) -> ToolCall:
    arguments = dict(call.arguments)
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which cannot be encoded
        text = json.dumps(arguments)
    return ToolCall(call.name, text)
