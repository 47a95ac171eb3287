"""The JSON format of Llama 3: an object with a name and parameters after the python tag, or alone."""

import re
from collections.abc import Callable
from json import JSONDecodeError, JSONDecoder

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.tools.formats.calls import (
    CallFormat,
    Reading,
    Schemas,
    call_of_object,
    collect,
    parse_json,
)

_TAG = "<|python_tag|>"
_BETWEEN = re.compile(r"\s*+;?\s*+")
_MOST_PARTS = 1_000
_ENDS = ("<|eom_id|>", "<|eot_id|>")


def _read(text: str, schemas: Schemas) -> Reading:
    plain = text.strip()
    for end in _ENDS:
        plain = plain.removesuffix(end).rstrip()
    content, tag, said = plain.partition(_TAG)
    if not tag:
        if not (plain.startswith("{") and '"name"' in plain):
            return Reading(content=plain)
        content, said = "", plain
    return collect([_reader(part) for part in _parts(said)], content)


def _reader(part: str) -> Callable[[], ToolCall]:
    return lambda: call_of_object(parse_json(part), "parameters")


def _parts(text: str) -> list[str]:
    """Cut objects that follow one another, with a semicolon or blanks between."""
    decoder, plain = JSONDecoder(), text.strip()
    parts: list[str] = []
    begin = 0
    while begin < len(plain) and len(parts) < _MOST_PARTS:
        try:
            _, end = decoder.raw_decode(plain, begin)
        except (JSONDecodeError, RecursionError, ValueError):
            return [*parts, plain[begin:]]
        parts.append(plain[begin:end])
        between = _BETWEEN.match(plain, end)
        begin = end if between is None else between.end()
    return parts or [text]


def _explain(schemas: Schemas) -> str:
    return (
        f"To call a tool, write {_TAG} and a JSON object with its name and parameters, and nothing after it, "
        f'for example:\n{_TAG}{{"name": "tool", "parameters": {{"parameter": "value"}}}}'
    )


LLAMA = CallFormat("llama", _read, _explain)
