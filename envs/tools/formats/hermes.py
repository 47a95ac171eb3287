"""The format of Hermes, Qwen2.5 and Qwen3: JSON in tool_call tags."""

from functools import partial

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.core.replies import Section, sections
from rollgym.envs.tools.formats.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    call_of_object,
    collect,
    parse_json,
    shown,
)


def _read(text: str, schemas: Schemas) -> Reading:
    found, rest = sections(text, "<tool_call>", "</tool_call>")
    return collect([partial(_call, section) for section in found], rest)


def _call(section: Section) -> ToolCall:
    if not section.closed:
        raise CallFault(f"the call {shown(section.body.strip())} is not closed by </tool_call>")
    return call_of_object(parse_json(section.body), "arguments")


def show_result(name: str, content: str) -> str:
    """Write what a call gave, as the templates of Qwen and Hermes have it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _explain(schemas: Schemas) -> str:
    return (
        "To call a tool, write a JSON object with its name and arguments inside tool_call tags, "
        'for example:\n<tool_call>\n{"name": "tool", "arguments": {"parameter": "value"}}\n</tool_call>'
    )


HERMES = CallFormat("hermes", _read, _explain, show_result)
