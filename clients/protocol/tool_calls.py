"""Tools that an environment declares in `info`, and calls of them in the formats that environments read.

An environment of tools takes text. A client whose model calls tools through an API writes each call as text here, in
the format that `info["call_format"]` names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_DEFAULT_FORMAT = "hermes"
_MARK = re.compile(r"<(?=[/a-zA-Z|])")


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


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of a tool.

    Attributes:
        name: The tool.
        arguments: Its arguments by name.
        call_id: By which its result is found again; may be empty.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


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
    return str(info.get("call_format", _DEFAULT_FORMAT))


def written_calls(call_format: str, calls: Sequence[WrittenCall], content: str = "") -> str:
    """Write calls as one action.

    Args:
        call_format: One of `CALL_WRITERS`.
        calls: The calls, in order.
        content: What the model said beside them.

    Raises:
        KeyError: No such format.
    """
    return CALL_WRITERS[call_format](calls, content)


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


# -- formats -----------------------------------------------------------------------------------------------------------


def _json(value: Any) -> str:
    # JSON has `<` in strings only. An argument that holds a mark, such as an end of a call or of thinking, must not
    # be read as one.
    return _MARK.sub("\\\\u003c", json.dumps(value, ensure_ascii=False))


def _hermes(calls: Sequence[WrittenCall], content: str) -> str:
    blocks = [content] if content else []
    for call in calls:
        text = _json({"name": call.name, "arguments": dict(call.arguments)})
        blocks.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(blocks)


def _qwen_xml(calls: Sequence[WrittenCall], content: str) -> str:
    lines = [content] if content else []
    for call in calls:
        lines += ["<tool_call>", f"<function={call.name}>"]
        for key, value in call.arguments.items():
            lines += [
                f"<parameter={key}>",
                value if isinstance(value, str) else _json(value),
                "</parameter>",
            ]
        lines += ["</function>", "</tool_call>"]
    return "\n".join(lines)


def _llama(calls: Sequence[WrittenCall], content: str) -> str:
    written = [_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls]
    return f"{content}<|python_tag|>" + "; ".join(written)


def _mistral(calls: Sequence[WrittenCall], content: str) -> str:
    written = [
        {"name": call.name, "arguments": dict(call.arguments), "id": call.call_id or f"{index:09d}"}
        for index, call in enumerate(calls)
    ]
    return f"{content}[TOOL_CALLS]{_json(written)}"


def _openai(calls: Sequence[WrittenCall], content: str) -> str:
    written = [
        {
            "id": call.call_id or f"call_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": _json(dict(call.arguments))},
        }
        for index, call in enumerate(calls)
    ]
    return _json({"role": "assistant", "content": content or None, "tool_calls": written})


CALL_WRITERS: Mapping[str, Callable[[Sequence[WrittenCall], str], str]] = {
    "hermes": _hermes,
    "qwen-xml": _qwen_xml,
    "llama": _llama,
    "mistral": _mistral,
    "openai": _openai,
}
"""Writes calls as one action, by the format that an environment names in `info["call_format"]`."""
