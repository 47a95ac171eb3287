"""The format of Qwen3-Coder: a tag for the function and one for each parameter, typed by the tool's schema."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envs.tools.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    ToolCall,
    as_json,
    collect,
    parse_json,
    parse_name,
    shown,
)

# A call that the end of the reply cut off counts, as it does where this format comes from.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _read(text: str, schemas: Schemas) -> Reading:
    bodies = [match[1] for match in _CALL.finditer(text)]
    return collect([_reader(body, schemas) for body in bodies], _CALL.sub("", text))


def _reader(body: str, schemas: Schemas) -> Callable[[], ToolCall]:
    return lambda: _call(body, schemas)


def _call(body: str, schemas: Schemas) -> ToolCall:
    function = _FUNCTION.search(body)
    if function is None:
        raise CallFault(f"the call {shown(body.strip())} has no <function=NAME>")
    name = parse_name(function[1])
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    for parameter in _PARAMETER.finditer(function[2]):
        key = parse_name(parameter[1])
        if key in arguments:
            raise CallFault(f"{shown(key)} is there twice")
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, properties.get(key, {}))
    return ToolCall(name, arguments)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    kinds = schema.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    if text.strip().lower() == "null":
        return None
    if kinds & {"integer", "number", "boolean", "array", "object"}:
        plain = text.strip()
        try:
            return parse_json(plain.lower() if plain.lower() in ("true", "false") else plain)
        except CallFault:
            # Whoever calls the tool says what type was wanted.
            return text
    return text


def _write(calls: Sequence[ToolCall]) -> str:
    return "\n".join(_written(call) for call in calls)


def _written(call: ToolCall) -> str:
    lines = ["<tool_call>", f"<function={call.name}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else as_json(value)
        lines += [f"<parameter={name}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def _show_result(name: str, content: str) -> str:
    return f"<tool_response>\n{content}\n</tool_response>"


def _explain(schemas: Schemas) -> str:
    return (
        "To call a tool, write its name and parameters as tags inside tool_call tags, for example:\n"
        "<tool_call>\n<function=tool>\n<parameter=parameter>\nvalue\n</parameter>\n</function>\n</tool_call>"
    )


QWEN_XML = CallFormat("qwen-xml", _read, _write, _show_result, _explain)
