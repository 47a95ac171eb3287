"""The format of Search-R1, ReTool and GEM: a tag of the tool's name around its one text, and fenced code."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.tools.formats.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    collect,
    parse_arguments,
    parse_json,
)

_RESULT_TAGS: Mapping[str, str] = {"search": "information", "python": "interpreter"}


def _read(text: str, schemas: Schemas) -> Reading:
    parameters = _only_texts(schemas)
    if not schemas:
        return Reading(content=text.strip())
    found, content = _marked(text, schemas, "python" in parameters)
    readers = [_reader(name, body, schemas.get(name, {}), parameters.get(name)) for name, body in found]
    opened = re.findall(rf"<({_any_of(schemas)})>", content)
    reading = collect(readers, content)
    faults = tuple(f"<{name}> is not closed by </{name}>" for name in opened)
    return Reading(reading.calls, reading.content, (*reading.faults, *faults))


def _any_of(schemas: Schemas) -> str:
    return "|".join(re.escape(name) for name in sorted(schemas, key=len, reverse=True))


def _marked(text: str, schemas: Schemas, programs: bool) -> tuple[list[tuple[str, str]], str]:
    """Return what stands in the tags of tools, and in those of programs, and the text beside them.

    Each opening mark goes together with the next closing one of its own; where there is none, it stays in the text, and
    no other of its name is looked for.
    """
    begin = re.compile(
        rf"<(?P<name>{_any_of(schemas)})>"
        + (r"|<(?P<code>code)>|```(?:python|py)[^\S\n]*+\n" if programs else "")
    )
    found, beside, position = [], [], 0
    closed: dict[str, bool] = {}
    for mark in begin.finditer(text):
        name = mark["name"] or (mark.groupdict().get("code") or "```")
        if mark.start() < position or not closed.get(name, True):
            continue
        end = text.find("```" if name == "```" else f"</{name}>", mark.end())
        closed[name] = end >= 0
        if end < 0:
            continue
        found.append((mark["name"] or "python", text[mark.end() : end]))
        beside.append(text[position : mark.start()])
        position = end + (3 if name == "```" else len(name) + 3)
    return found, "".join([*beside, text[position:]])


def _reader(name: str, body: str, schema: Mapping[str, Any], parameter: str | None) -> Callable[[], ToolCall]:
    def read() -> ToolCall:
        said = body.strip()
        if parameter is None:
            return ToolCall(name, parse_arguments(parse_json(said or "{}")))
        if said.startswith("{") and (several := _several(said, schema, parameter)) is not None:
            return ToolCall(name, several)
        return ToolCall(name, {parameter: body.strip("\n") if name == "python" else said})

    return read


def _several(said: str, schema: Mapping[str, Any], parameter: str) -> Mapping[str, Any] | None:
    """Return the arguments where a text is a JSON object of them: the one that is needed and optional ones."""
    try:
        found = parse_arguments(parse_json(said))
    except CallFault:
        return None
    known = schema.get("properties", {}).keys()
    return found if parameter in found and found.keys() <= known else None


def _only_texts(schemas: Schemas) -> dict[str, str]:
    """Return the one parameter of each tool that needs one text and nothing else."""
    found = {}
    for name, schema in schemas.items():
        required = schema.get("required", [])
        if len(required) == 1 and schema.get("properties", {}).get(required[0], {}).get("type") == "string":
            found[name] = required[0]
    return found


def _show_result(name: str, content: str) -> str:
    tag = _RESULT_TAGS.get(name, "result")
    return f"<{tag}>{content}</{tag}>"


def _explain(schemas: Schemas) -> str:
    texts = _only_texts(schemas)
    examples = [
        f"<{name}>{texts[name]}</{name}>" if name in texts else f"<{name}>{{JSON object}}</{name}>"
        for name in schemas
    ]
    return "To call a tool, write what it needs in a tag of its name: " + ", ".join(examples)


TAGS = CallFormat("tags", _read, _explain, _show_result)
