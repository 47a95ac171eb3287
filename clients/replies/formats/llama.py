"""The JSON format of Llama 3: an object with a name and parameters after the python tag, or alone."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import (
    MOST_CANDIDATES,
    CallFormat,
    CallGrammar,
    Reading,
    Schemas,
    call_of_object,
    collect_whole,
    is_meant_as_call,
    json_tag,
    said_around,
    split_at_mark,
)
from rollgym.clients.replies.json_values import CallFault, as_json, as_json_of_calls, json_end, parse_json

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"\s*+;?\s*+")
# As inference servers have it.
_ANYTHING_BETWEEN = re.compile(r"[\s;,]*+")
_ENDS = ("<|eom_id|>", "<|eot_id|>")


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    plain = text.strip()
    for end in _ENDS:
        plain = plain.removesuffix(end).rstrip()
    separator = _BETWEEN if strict else _ANYTHING_BETWEEN
    content, tag, said = split_at_mark(plain, _TAG, separator)
    if not tag:
        if not _is_meant(plain, schemas):
            return Reading(content=plain, remaining=text)
        content, said = "", plain
    parts = _parts(said.strip(), separator)
    if not strict and len(parts) > 1 and not parts[-1].startswith("{"):
        # What was said behind calls is not part of them.
        content = said_around(content, f"\n{parts.pop()}")
    return collect_whole(text, content, [partial(_call, part, strict) for part in parts])


def _is_meant(text: str, schemas: Schemas) -> bool:
    """Whether a text without the tag is a call, or the attempt at one."""
    if not text.startswith("{") or '"name"' not in text:
        return False
    end = json_end(text, 0)
    if end is None:
        return '"parameters"' in text or '"arguments"' in text
    try:
        return is_meant_as_call(parse_json(text[:end], strict=False), schemas)
    except CallFault:
        return True


def _call(part: str, strict: bool) -> ToolCall:
    return call_of_object(parse_json(part, strict=strict), "parameters", strict=strict)


def _parts(text: str, separator: re.Pattern[str]) -> list[str]:
    """Cut objects that follow one another."""
    parts: list[str] = []
    begin = 0
    while begin < len(text) and len(parts) < MOST_CANDIDATES:
        end = json_end(text, begin)
        if end is None:
            return [*parts, text[begin:]]
        parts.append(text[begin:end])
        between = separator.match(text, end)
        begin = end if between is None else between.end()
    return parts or [text]


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    written = [as_json_of_calls({"name": call.name, "parameters": dict(call.arguments)}) for call in calls]
    return content + _TAG + "; ".join(written)


def _explain(schemas: Schemas) -> str:
    return (
        f"To call a tool, write {_TAG} and a JSON object with its name and parameters, and nothing after it, "
        f'for example:\n{_TAG}{{"name": "tool", "parameters": {{"parameter": "value"}}}}'
    )


def _call_tag(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # Without the mark, a control token that grammars have no name for: the templates ask for the object alone.
    return json_tag(f'{{"name": {as_json(name)}, "parameters": ', schema, "}")


LLAMA = CallFormat(
    "llama",
    _read,
    _write,
    _explain,
    mark=_TAG,
    bare="{",
    whole=True,
    grammar=CallGrammar(_call_tag, separator="; "),
    template_marks=("<|start_header_id|>", _TAG),
    form='`<\\|python_tag\\|>{"name", "parameters"}`, several with `;`, or without the tag',
    used_by="Llama 3",
)
