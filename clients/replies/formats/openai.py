"""The format of OpenAI's chat API: an assistant's message with `tool_calls`, or that list alone."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    CallFormat,
    Reading,
    Schemas,
    collect_whole,
    parse_arguments,
    parse_name,
)
from rollgym.clients.replies.json_values import CallFault, as_json, as_json_of_calls, parse_json


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    plain = text.strip()
    if not plain.startswith(("{", "[")):
        return Reading(content=plain, remaining=text)
    meant = '"tool_calls"' in plain or '"function"' in plain
    try:
        value = parse_json(plain, strict=strict)
    except CallFault as fault:
        faults = (str(fault),) if meant else ()
        return Reading(content="" if meant else plain, faults=faults, remaining=text)
    if isinstance(value, dict) and "tool_calls" in value:
        content, items = value.get("content"), value["tool_calls"]
    elif isinstance(value, dict) and isinstance(value.get("function"), dict):
        content, items = "", [value]
    elif isinstance(value, list) and any(isinstance(each, dict) and "function" in each for each in value):
        content, items = "", value
    else:
        return Reading(content=plain, remaining=text)
    if items is None:
        items = []
    if not isinstance(items, list):
        return Reading(faults=("tool_calls must be a list",), remaining=text)
    said = content if isinstance(content, str) else ""
    return collect_whole(text, said, [partial(call_of_item, item, strict) for item in items])


def call_of_item(item: Any, strict: bool = True) -> ToolCall:
    """Return the call that one item of `tool_calls` stands for.

    Raises:
        CallFault: If it is not one.
    """
    if not isinstance(item, dict) or not isinstance(item.get("function"), dict):
        raise CallFault("a call needs a function with a name and arguments")
    if item.get("type", "function") != "function":
        raise CallFault("a call is of the type function")
    function, call_id = item["function"], item.get("id", "")
    if not isinstance(call_id, str):
        raise CallFault("the id of a call is text")
    arguments = parse_arguments(function.get("arguments", {}), strict=strict)
    return ToolCall(parse_name(function.get("name")), arguments, call_id)


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    message = {"role": "assistant", "content": content or None, "tool_calls": _items(calls)}
    return as_json_of_calls(message)


def _items(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return calls as OpenAI's chat API has them in a message's `tool_calls`."""
    return [
        {
            "id": call.id or f"call_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": as_json(dict(call.arguments))},
        }
        for number, call in enumerate(calls)
    ]


def _explain(schemas: Schemas) -> str:
    example = _items([ToolCall("tool", {"parameter": "value"}, "call_0")])
    return (
        "To call tools, reply with nothing but a JSON object that has them in `tool_calls`; the arguments are "
        f"JSON text, for example:\n{as_json({'tool_calls': example})}"
    )


OPENAI = CallFormat(
    "openai",
    _read,
    _write,
    _explain,
    whole=True,
    form='`{"tool_calls": [{"id", "type", "function": {"name", "arguments": JSON text}}]}`, the list alone, '
    "or one call",
    used_by="the chat API",
)
