"""The format of Qwen3-Coder: a tag for the function and one for each parameter, typed by the tool's schema."""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.core.replies import sections
from rollgym.envs.tools.formats.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    collect,
    parse_json,
    parse_name,
    shown,
)
from rollgym.envs.tools.formats.hermes import show_result
from rollgym.envs.tools.formats.literals import ExpressionParser, literal_of


def _read(text: str, schemas: Schemas) -> Reading:
    # A call that the end of the reply cut off counts, as it does where this format comes from.
    found, rest = sections(text, "<tool_call>", "</tool_call>")
    parser = ExpressionParser()
    return collect([partial(_call, section.body, schemas, parser) for section in found], rest)


def _call(body: str, schemas: Schemas, parser: ExpressionParser) -> ToolCall:
    head = _named(body.partition("<function=")[2].partition("</function>")[0])
    if head is None:
        raise CallFault(f"the call {shown(body.strip())} has no <function=NAME>")
    name, said = parse_name(head[0]), head[1]
    properties = schemas.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    parameters, _ = sections(said, "<parameter=", "</parameter>")
    for parameter in filter(None, (_named(section.body) for section in parameters)):
        key = parse_name(parameter[0])
        if key in arguments:
            raise CallFault(f"{shown(key)} is there twice")
        value = parameter[1].removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, properties.get(key, {}), parser)
    return ToolCall(name, arguments)


def _named(body: str) -> tuple[str, str] | None:
    """Split `NAME>what it holds`; None where there is no name."""
    name, mark, rest = body.partition(">")
    return (name, rest) if mark and "\n" not in name else None


def _typed(text: str, schema: Mapping[str, Any], parser: ExpressionParser) -> Any:
    """Return a value as the format's reference parser reads it.

    Numbers, booleans, lists and objects are JSON, or else literals of Python, as models write them. What is neither
    stays text: whoever calls the tool says what type was wanted.
    """
    kinds = schema.get("type", "string")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    plain = text.strip()
    if plain.lower() == "null":
        return None
    if not kinds & {"integer", "number", "boolean", "array", "object"}:
        return text
    if plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    with suppress(CallFault):
        return parse_json(plain)
    with suppress(CallFault):
        return literal_of(parser.parse(plain), text_keys=False)
    return text


def _explain(schemas: Schemas) -> str:
    return (
        "To call a tool, write its name and parameters as tags inside tool_call tags, for example:\n"
        "<tool_call>\n<function=tool>\n<parameter=parameter>\nvalue\n</parameter>\n</function>\n</tool_call>"
    )


QWEN_XML = CallFormat("qwen-xml", _read, _explain, show_result)
