"""The format of OpenAI's chat API: an assistant's message with `tool_calls`, or that list alone."""

from functools import partial
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall, as_json, openai_items
from rollgym.envs.tools.formats.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    collect,
    parse_arguments,
    parse_json,
    parse_name,
)


def _read(text: str, schemas: Schemas) -> Reading:
    plain = text.strip()
    if not plain.startswith(("{", "[")):
        return Reading(content=plain)
    meant = '"tool_calls"' in plain or '"function"' in plain
    try:
        value = parse_json(plain)
    except CallFault as fault:
        return Reading(faults=(str(fault),)) if meant else Reading(content=plain)
    if isinstance(value, dict) and "tool_calls" in value:
        content, items = value.get("content"), value["tool_calls"]
    elif isinstance(value, dict) and "function" in value:
        content, items = "", [value]
    elif isinstance(value, list) and meant:
        content, items = "", value
    else:
        return Reading(content=plain)
    if items is None:
        items = []
    if not isinstance(items, list):
        return Reading(faults=("tool_calls must be a list",))
    return collect(
        [partial(call_of_item, item) for item in items], content if isinstance(content, str) else ""
    )


def call_of_item(item: Any) -> ToolCall:
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
    return ToolCall(parse_name(function.get("name")), parse_arguments(function.get("arguments", {})), call_id)


def _explain(schemas: Schemas) -> str:
    example = openai_items([ToolCall("tool", {"parameter": "value"}, "call_0")])
    return (
        "To call tools, reply with nothing but a JSON object that has them in `tool_calls`; the arguments are "
        f"JSON text, for example:\n{as_json({'tool_calls': example})}"
    )


OPENAI = CallFormat("openai", _read, _explain)
