"""How a reply writes calls of tools, in each format that an environment may name in `info["call_format"]`.

Environments, agents and checks all write calls with these functions; the readers are in `rollgym.envs.tools.formats`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

DEFAULT_CALL_FORMAT = "hermes"
"""The format of an environment that names none."""

# What readers of replies look for, wherever it stands.
_MARKS = re.compile(
    r"</?(?:think|thinking|thought|tool_call)>|\[TOOL_CALLS\]|<\|python_tag\|>", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        name: Of the tool.
        arguments: By the names of its parameters.
        id: What the policy calls the call; empty in formats that have no ids.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


def as_json(value: Any) -> str:
    """Write JSON as models do: with blanks after commas and colons, and all characters as they are."""
    return json.dumps(value, ensure_ascii=False)


def as_json_of_calls(value: Any) -> str:
    """Write JSON in which no text holds a mark that a reader would take for one of its own: `<` is `\\u003c` there."""
    return _MARKS.sub(lambda mark: f"\\u{ord(mark[0][0]):04x}{mark[0][1:]}", as_json(value))


def openai_items(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return calls as OpenAI's chat API has them in a message's `tool_calls`."""
    return [
        {
            "id": call.id or f"call_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": as_json(dict(call.arguments))},
        }
        for number, call in enumerate(calls)
    ]


def _hermes(calls: Sequence[ToolCall]) -> str:
    written = [as_json_of_calls({"name": call.name, "arguments": dict(call.arguments)}) for call in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


def _qwen_xml(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_qwen_xml_call(call) for call in calls)


def _qwen_xml_call(call: ToolCall) -> str:
    lines = ["<tool_call>", f"<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else as_json(value)
        lines += [f"<parameter={name}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def _openai(calls: Sequence[ToolCall]) -> str:
    return as_json_of_calls({"role": "assistant", "content": None, "tool_calls": openai_items(calls)})


def _llama(calls: Sequence[ToolCall]) -> str:
    written = [as_json_of_calls({"name": call.name, "parameters": dict(call.arguments)}) for call in calls]
    return "<|python_tag|>" + "; ".join(written)


def _mistral(calls: Sequence[ToolCall]) -> str:
    # Mistral's templates want ids of nine letters and digits.
    items = [
        {"name": call.name, "arguments": dict(call.arguments), "id": call.id or f"{number:09d}"}
        for number, call in enumerate(calls)
    ]
    return "[TOOL_CALLS]" + as_json_of_calls(items)


def _python(calls: Sequence[ToolCall]) -> str:
    return f"[{', '.join(_python_call(call) for call in calls)}]"


def _python_call(call: ToolCall) -> str:
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"


def _tags(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"<{call.name}>{_tags_body(call)}</{call.name}>" for call in calls)


def _tags_body(call: ToolCall) -> str:
    values = list(call.arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return as_json(dict(call.arguments))


CALL_WRITERS: Mapping[str, Callable[[Sequence[ToolCall]], str]] = MappingProxyType(
    {
        "hermes": _hermes,
        "qwen-xml": _qwen_xml,
        "openai": _openai,
        "llama": _llama,
        "mistral": _mistral,
        "python": _python,
        "tags": _tags,
    }
)
"""Writes the calls of one reply, by the format's name."""
