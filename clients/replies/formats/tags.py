"""The format of Search-R1, ReTool and GEM: a tag of the tool's name around its one text, and fenced code."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    MOST_CALLS,
    CallFormat,
    Candidate,
    Reading,
    Schemas,
    collect,
    parse_arguments,
)
from rollgym.clients.replies.json_values import CallFault, as_json, parse_json
from rollgym.clients.replies.quoting import Quoting
from rollgym.clients.replies.thinking import strip_thinking

# Within a line of a program, the same mark is a part of it.
_FENCE_END = re.compile(r"```(?=[^\S\n]*+(?:\n|\Z))")
_FENCE = "```python\n"
"""Before a program, so that it is read as one."""
_PROGRAMS = frozenset({"python", "code"})
_MOST_ENDS = 100
_RESULT_TAGS: Mapping[str, str] = {"search": "information", "python": "interpreter"}


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    if not schemas:
        return Reading(content=text.strip(), remaining=text)
    parameters = _only_texts(schemas)
    candidates = [
        Candidate(start, end, _reader(name, body, schemas.get(name, {}), parameters.get(name), strict))
        for start, end, name, body in _marked(text, schemas, "python" in parameters)
    ]
    reading = collect(text, candidates)
    opened = re.findall(rf"<({_any_of(schemas)})>", reading.content)
    faults = tuple(f"<{name}> is not closed by </{name}>" for name in opened)
    return Reading(reading.calls, reading.content, (*reading.faults, *faults), reading.remaining)


def _any_of(schemas: Schemas) -> str:
    return "|".join(re.escape(name) for name in sorted(schemas, key=len, reverse=True))


def _marked(text: str, schemas: Schemas, programs: bool) -> list[tuple[int, int, str, str]]:
    """Return where the tags of tools, and those of programs, begin and end, with the tool and what stands in them.

    Each opening mark goes together with the next closing one of its own, that of a fence with the next that ends a
    line; without one, it stays in the text, and no other of its name is looked for.
    """
    begin = re.compile(
        rf"<(?P<name>{_any_of(schemas)})>"
        + (r"|<(?P<code>code)>|```(?:python|py)[^\S\n]*+\n" if programs else "")
    )
    found: list[tuple[int, int, str, str]] = []
    position = 0
    closed: dict[str, bool] = {}
    for mark in begin.finditer(text):
        name = mark["name"] or (mark.groupdict().get("code") or "```")
        if mark.start() < position or not closed.get(name, True):
            continue
        closing = "```" if name == "```" else f"</{name}>"
        end = text.find(closing, mark.end())
        if name in _PROGRAMS and end >= 0 and len(found) < MOST_CALLS:
            end = _program_end(text, mark, closing, end)
        if name == "```" and (line := _FENCE_END.search(text, mark.end())) is not None:
            end = line.start()
        closed[name] = end >= 0
        if end < 0:
            continue
        position = end + len(closing)
        found.append((mark.start(), position, mark["name"] or "python", text[mark.end() : end]))
    return found


def _program_end(text: str, opening: re.Match[str], closing: str, first: int) -> int:
    """Return the closing mark of a program that no text and no comment of it holds; the first where all are held."""
    begin = opening.end()
    following = text.find(opening[0], begin)
    stop = following if following >= 0 else len(text)
    if text.find(closing, first + 1, stop) < 0:
        return first
    quoting = Quoting(f"{_FENCE}{text[begin:stop]}")
    ends = itertools.islice(re.compile(re.escape(closing)).finditer(text, begin, stop), _MOST_ENDS)
    return next((end.start() for end in ends if not quoting.holds(end.start() - begin + len(_FENCE))), first)


def _reader(
    name: str, body: str, schema: Mapping[str, Any], parameter: str | None, strict: bool
) -> Callable[[], ToolCall]:
    def read() -> ToolCall:
        said = body.strip()
        if parameter is None:
            return ToolCall(name, parse_arguments(parse_json(said or "{}", strict=strict)))
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
    known = _properties(schema).keys()
    return found if parameter in found and found.keys() <= known else None


def _only_texts(schemas: Schemas) -> dict[str, str]:
    """Return the one parameter of each tool that needs one text and nothing else."""
    found = {}
    for name, schema in schemas.items():
        required = schema.get("required")
        if not isinstance(required, list | tuple) or len(required) != 1 or not isinstance(required[0], str):
            continue
        wanted = _properties(schema).get(required[0])
        if isinstance(wanted, Mapping) and wanted.get("type") == "string":
            found[name] = required[0]
    return found


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters; none if an environment declares something else."""
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    known = schemas or _likely_schemas(calls)
    written = [f"<{call.name}>{_body(call, known)}</{call.name}>" for call in calls]
    return "\n".join([content, *written] if content else written)


def _body(call: ToolCall, schemas: Schemas) -> str:
    """Return a text as it is if it is read as it is; otherwise, as all that is not a single text, JSON."""
    values = list(call.arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        plain = f"<{call.name}>{values[0]}</{call.name}>"
        reading = _read(plain, schemas, True)
        alike = not reading.faults and [each.arguments for each in reading.calls] == [call.arguments]
        if alike and strip_thinking(plain) == plain:
            return values[0]
    # `<` stands in texts only, and no mark of a tag is read in what is written so.
    return as_json(dict(call.arguments)).replace("<", "\\u003c")


def _likely_schemas(calls: Sequence[ToolCall]) -> Schemas:
    """Return schemas by which calls can be read, where those of their tools are not known."""
    found: dict[str, dict[str, Any]] = {}
    for call in calls:
        schema = found.setdefault(call.name, {"properties": {}})
        schema["properties"].update({name: {"type": "string"} for name in call.arguments})
        if len(call.arguments) == 1 and isinstance(next(iter(call.arguments.values())), str):
            schema.setdefault("required", list(call.arguments))
    return found


def _written_as(calls: Sequence[ToolCall]) -> tuple[Sequence[ToolCall], Schemas]:
    return calls, _likely_schemas(calls)


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


TAGS = CallFormat(
    "tags",
    _read,
    _write,
    _explain,
    _show_result,
    _written_as,
    form="`<search>text</search>`, `<python>`, `<code>`, a fenced block of Python; JSON inside for several arguments",
    used_by="Search-R1, ReTool, GEM",
)
