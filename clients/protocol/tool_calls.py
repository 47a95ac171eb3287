"""Tools that an environment declares in `info`, and how a reply writes calls of them.

The formats are those that an environment may name in `info["call_format"]`.

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


@dataclass(frozen=True, slots=True)
class ToolDeclaration:
    """A tool of an environment.

    Attributes:
        name: What calls name it.
        description: What it does, for the model.
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


def declared_tools(info: Mapping[str, Any]) -> list[ToolDeclaration]:
    """Return the tools that an environment declares at a reset.

    Declarations without a name are left out, and all of them where the environment reads calls in a format that
    `written_calls` does not write.

    Args:
        info: The `info` of a reset.
    """
    tools = info.get("tools")
    if call_format_of(info) not in CALL_WRITERS or not isinstance(tools, Sequence) or isinstance(tools, str):
        return []
    found: dict[str, ToolDeclaration] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            continue
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping):
            parameters = {"type": "object", "properties": {}}
        found[name] = ToolDeclaration(name, str(function.get("description") or ""), parameters)
    return list(found.values())


def call_format_of(info: Mapping[str, Any]) -> str:
    """Return the name of the format in which an environment reads calls; Hermes where it names none."""
    return str(info.get("call_format", DEFAULT_CALL_FORMAT))


def written_calls(call_format: str, calls: Sequence[ToolCall], content: str = "") -> str:
    """Write calls as one action.

    Args:
        call_format: One of `CALL_WRITERS`.
        calls: The calls, in order.
        content: What the model said beside them. It stands before the calls; the format `python` has no place for it.

    Raises:
        KeyError: No such format.
    """
    if call_format == "openai":
        return _openai(calls, content)
    written = CALL_WRITERS[call_format](calls)
    if not content or call_format == "python":
        return written
    between = "" if call_format in ("llama", "mistral") else "\n"
    return f"{content}{between}{written}"


def tool_results(info: Mapping[str, Any]) -> list[str]:
    """Return the results of the calls of a step, in order, without the marks of the format.

    Args:
        info: The `info` of a step.
    """
    return [text for role, text in _messages(info) if role == "tool"]


def other_messages(info: Mapping[str, Any]) -> list[str]:
    """Return what the environment said in a step beside the results of calls."""
    return [text for role, text in _messages(info) if role != "tool"]


def answer_text(observation: str, info: Mapping[str, Any]) -> str:
    """Return what one call of a tool returns to the model: the results, or else the observation."""
    messages = _messages(info)
    return "\n".join(text for _, text in messages) if messages else observation


def _messages(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return role and text of the messages of a step; nothing where one of them is not text."""
    messages = info.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return []
    found = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), str):
            return []
        found.append((str(message.get("role")), content))
    return found


# -- formats ---------------------------------------------------------------------------------------------------------


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


def _openai(calls: Sequence[ToolCall], content: str = "") -> str:
    return as_json_of_calls(
        {"role": "assistant", "content": content or None, "tool_calls": openai_items(calls)}
    )


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
