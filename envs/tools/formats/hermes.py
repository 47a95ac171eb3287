"""The format of Hermes, Qwen2.5 and Qwen3: JSON in tool_call tags."""

import re
from collections.abc import Callable, Sequence

from envs.tools.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    ToolCall,
    as_json,
    call_of_object,
    collect,
    parse_json,
    shown,
)

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


def _read(text: str, schemas: Schemas) -> Reading:
    found = list(_CALL.finditer(text))
    return collect([_reader(match) for match in found], _CALL.sub("", text))


def _reader(match: re.Match[str]) -> Callable[[], ToolCall]:
    return lambda: _call(match)


def _call(match: re.Match[str]) -> ToolCall:
    if not match[2]:
        raise CallFault(f"the call {shown(match[1].strip())} is not closed by </tool_call>")
    return call_of_object(parse_json(match[1]), "arguments")


def _write(calls: Sequence[ToolCall]) -> str:
    written = [as_json({"name": call.name, "arguments": dict(call.arguments)}) for call in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in written)


def _show_result(name: str, content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def _explain(schemas: Schemas) -> str:
    return (
        "To call a tool, write a JSON object with its name and arguments inside tool_call tags, "
        'for example:\n<tool_call>\n{"name": "tool", "arguments": {"parameter": "value"}}\n</tool_call>'
    )


HERMES = CallFormat("hermes", _read, _write, _show_result, _explain)
