"""The format of Hermes, Qwen2.5 and Qwen3: JSON in tool_call tags."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    MOST_CANDIDATES,
    CallFormat,
    CallGrammar,
    Candidate,
    Reading,
    Schemas,
    call_of_object,
    collect,
    json_tag,
)
from rollgym.clients.replies.json_values import (
    CallFault,
    as_json,
    as_json_of_calls,
    behind_blanks,
    json_end,
    parse_json,
    shown,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    candidates: list[Candidate] = []
    start = text.find(_OPENING)
    while start >= 0 and len(candidates) < MOST_CANDIDATES:
        candidates.append(_candidate(text, start, strict))
        start = text.find(_OPENING, candidates[-1].end)
    return collect(text, candidates)


def _candidate(text: str, start: int, strict: bool) -> Candidate:
    """Return what stands behind an opening mark: JSON has an end of its own, whatever marks are in its texts."""
    begin = start + len(_OPENING)
    end = json_end(text, begin)
    if end is not None and text.startswith(_CLOSING, behind := behind_blanks(text, end)):
        return Candidate(start, behind + len(_CLOSING), partial(_call, text[begin:end], strict))
    following = text.find(_OPENING, begin if end is None else end)
    stop = following if following >= 0 else len(text)
    closing = text.find(_CLOSING, begin if end is None else end, stop)
    if closing >= 0:
        return Candidate(start, closing + len(_CLOSING), partial(_call, text[begin:closing], strict))
    return Candidate(start, stop, partial(_unclosed_call, text[begin:stop], strict))


def _call(body: str, strict: bool) -> ToolCall:
    return call_of_object(parse_json(body, strict=strict), "arguments", strict=strict)


def _unclosed_call(body: str, strict: bool) -> ToolCall:
    if strict:
        raise CallFault(f"the call {shown(body.strip())} is not closed by {_CLOSING}")
    return _call(body, strict)


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    written = [as_json_of_calls({"name": call.name, "arguments": dict(call.arguments)}) for call in calls]
    sections = [f"{_OPENING}\n{text}\n{_CLOSING}" for text in written]
    return "\n".join([content, *sections] if content else sections)


def show_result(name: str, content: str) -> str:
    """Write what a call gave, as the templates of Qwen and Hermes have it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def _explain(schemas: Schemas) -> str:
    return (
        "To call a tool, write a JSON object with its name and arguments inside tool_call tags, "
        'for example:\n<tool_call>\n{"name": "tool", "arguments": {"parameter": "value"}}\n</tool_call>'
    )


def _tag(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return json_tag(f'{_OPENING}\n{{"name": {as_json(name)}, "arguments": ', schema, f"}}\n{_CLOSING}")


HERMES = CallFormat(
    "hermes",
    _read,
    _write,
    _explain,
    show_result,
    mark=_OPENING,
    grammar=CallGrammar(_tag, separator="\n", marked=True),
    template_marks=(_OPENING,),
    form='`<tool_call>{"name", "arguments"}</tool_call>`',
    used_by="Hermes, Qwen2.5, Qwen3",
)
