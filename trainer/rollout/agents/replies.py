"""A reply of the policy as agents receive it: thinking, content, and calls of tools.

The readers that environments use (`rollgym.clients.replies`) parse it, and it is as lenient as inference servers are.
What is not a proper tool call stays content, so that the agent can tell the policy what was wrong.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.clients.protocol import tool_calls
from rollgym.clients.protocol.tool_calls import DEFAULT_CALL_FORMAT
from rollgym.clients.replies.formats.calls import Schemas
from rollgym.clients.replies.formats.table import FORMATS, OURS
from rollgym.clients.replies.thinking import split_thinking


@dataclass(frozen=True, slots=True)
class ApiToolCall:
    """A call of a tool.

    Attributes:
        name: The tool.
        arguments: JSON text, as the API has it.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A reply, taken apart.

    Attributes:
        content: The visible text.
        reasoning: The thinking; None if it does not think.
        calls: The tool calls.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ApiToolCall, ...] = ()


def read_reply(
    text: str,
    tool_format: str | None = None,
    *,
    begun: bool = False,
    schemas: Schemas | None = None,
    begins: tuple[str, ...] = (),
) -> ParsedReply:
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
        return ParsedReply(said, reasoning)
    form = FORMATS[tool_format]
    reading = form.read(said, schemas or {}, strict=False)
    if not reading.calls or (form.whole and reading.faults):
        return ParsedReply(said, reasoning)
    # What is said beside calls comes without the blanks that lead over to them.
    return ParsedReply(reading.remaining.rstrip(), reasoning, tuple(map(_as_text, reading.calls)))


def has_mark(text: str, tool_format: str) -> bool:
    """Whether a text contains the opening of a call, of a format or of any of our families."""
    return any(form.mark in text for form in (FORMATS[tool_format], *OURS) if form.template_marks)


def format_of_template(template: str) -> str:
    """Return the format in which the family of a chat template writes calls; Hermes if it shows none.

    Raises:
        ValueError: A format that a package adds is broken.
    """
    for name in FORMATS.of_templates():
        if any(mark in template for mark in FORMATS[name].template_marks):
            return name
    return DEFAULT_CALL_FORMAT


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the schemas of the tools that an agent offers, by their names."""
    declared = [tool["function"] for tool in tools]
    return {
        each["name"]: each["parameters"] for each in declared if isinstance(each.get("parameters"), Mapping)
    }


def _as_text(call: tool_calls.ToolCall) -> ApiToolCall:
    arguments = dict(call.arguments)
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which cannot be encoded
        text = json.dumps(arguments)
    return ApiToolCall(call.name, text)
