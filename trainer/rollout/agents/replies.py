r"""Reads a reply of the policy as agents want it: content, thinking, and calls of tools. Every step is linear.

A policy that repeats itself writes a megabyte of open tags by itself, and it is read in the event loop of all agents:
nothing here looks at a place more than a fixed number of times. What is no proper call of a tool stays content, as
inference servers have it, so that the agent can say to the policy what was wrong.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import JSONDecodeError, JSONDecoder
from typing import Any, Literal, get_args

ToolFormat = Literal["hermes", "qwen_xml", "llama", "mistral"]
"""How a family of models writes calls of tools."""
FORMATS: tuple[ToolFormat, ...] = get_args(ToolFormat)

MARKS: Mapping[ToolFormat, str] = {
    "hermes": "<tool_call>",
    "qwen_xml": "<tool_call>",
    "llama": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
}
"""What stands before a call."""
MOST_CALLS = 256
"""Calls that are read of one reply."""
OPENING, CLOSING = "<think>", "</think>"
"""What stands around thinking."""
_BETWEEN = re.compile(r"[\s;,]*+")
_PARAMETER = "<parameter="


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: The tool.
        arguments: JSON text, as the API has it.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, taken apart.

    Attributes:
        content: What it says.
        reasoning: What it thinks; None where it does not.
        calls: Which tools it calls.
    """

    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


class _NoCallError(Exception):
    """What was meant as a call is none."""


def read_reply(text: str, tool_format: ToolFormat | None = None, *, begun: bool = False) -> Reply:
    """Take a reply apart.

    Args:
        text: All of it, with the marks of its family and without the closing of the turn.
        tool_format: How calls are written; None where none are looked for.
        begun: Whether the prompt has opened the thinking already.
    """
    reasoning, said = _without_thinking(text, begun=begun)
    if tool_format is None:
        return Reply(said, reasoning)
    content, calls = _READERS[tool_format](said)
    return Reply(content, reasoning, tuple(calls))


def has_mark(text: str) -> bool:
    """Whether a text has what stands before a call, of whatever family."""
    return any(mark in text for mark in MARKS.values())


def _without_thinking(text: str, *, begun: bool) -> tuple[str | None, str]:
    if not begun and not text.lstrip().startswith(OPENING):
        return None, text
    thought, closed, said = text.partition(CLOSING)
    thought = thought.lstrip().removeprefix(OPENING).strip("\n")
    # Thinking that was cut off was never said.
    return thought, (said.lstrip("\n") if closed else "")


def format_of_template(template: str) -> ToolFormat:
    """Return how the family of a chat template writes calls; Hermes where nothing tells."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    return "llama" if "<|start_header_id|>" in template or "<|python_tag|>" in template else "hermes"


# -- families --------------------------------------------------------------------------------------------------------


def _read_sections(said: str, read: Callable[[str], ToolCall]) -> tuple[str, list[ToolCall]]:
    """Read what stands in tool_call tags; a section that is no call stays where it is."""
    outside, *parts = said.split("<tool_call>", MOST_CALLS)
    kept, calls = [outside], []
    for part in parts:
        body, closed, behind = part.partition("</tool_call>")
        try:
            calls.append(read(body))
            kept.append(behind)
        except _NoCallError:
            kept.append("<tool_call>" + body + closed + behind)
    content = "".join(kept)
    return (_before_calls(content) if calls else content), calls


def _before_calls(content: str) -> str:
    """Return what is said beside calls, without the blanks that lead over to them."""
    return content.rstrip()


def _hermes(said: str) -> tuple[str, list[ToolCall]]:
    return _read_sections(said, lambda body: _call_of(_parsed(body)))


def _qwen_xml(said: str) -> tuple[str, list[ToolCall]]:
    return _read_sections(said, _xml_call)


def _xml_call(body: str) -> ToolCall:
    head, opened, rest = body.partition("<function=")
    name, ended, inner = rest.partition(">")
    if head.strip() or not opened or not ended or not name.strip():
        raise _NoCallError
    inner = inner.partition("</function>")[0]
    values = {}
    for part in inner.split(_PARAMETER, MOST_CALLS)[1:]:
        key, ended, value = part.partition(">")
        if not ended:
            raise _NoCallError
        values[key.strip()] = _xml_value(value.partition("</parameter>")[0])
    return ToolCall(name.strip(), _json(values))


def _xml_value(text: str) -> Any:
    plain = text.strip("\n")
    try:
        return _parsed(plain)
    except _NoCallError:
        return plain


def _llama(said: str) -> tuple[str, list[ToolCall]]:
    content, tag, meant = said.partition("<|python_tag|>")
    if not tag:
        content, meant = "", said.strip()
        if not meant.startswith("{"):
            return said, []
    try:
        calls = [_call_of(value) for value in _values(meant)]
    except _NoCallError:
        return said, []
    return (content, calls) if calls else (said, [])


def _mistral(said: str) -> tuple[str, list[ToolCall]]:
    content, mark, meant = said.partition("[TOOL_CALLS]")
    if not mark:
        # The mark is a special token, which some decoders leave out.
        content, meant = "", said.strip()
        if not meant.startswith("[{"):
            return said, []
    try:
        calls = _named_calls(meant) if "[ARGS]" in meant else _listed_calls(meant)
    except _NoCallError:
        return said, []
    return _before_calls(content), calls


def _listed_calls(text: str) -> list[ToolCall]:
    value = _parsed(text)
    if not isinstance(value, list) or not 0 < len(value) <= MOST_CALLS:
        raise _NoCallError
    return [_call_of(each) for each in value]


def _named_calls(text: str) -> list[ToolCall]:
    calls = []
    for part in text.split("[TOOL_CALLS]", MOST_CALLS):
        name, mark, arguments = part.partition("[ARGS]")
        name = name.partition("[CALL_ID]")[0].strip()
        value = _parsed(arguments)
        if not mark or not name or not isinstance(value, dict):
            raise _NoCallError
        calls.append(ToolCall(name, _json(value)))
    return calls


_READERS: Mapping[ToolFormat, Callable[[str], tuple[str, list[ToolCall]]]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama": _llama,
    "mistral": _mistral,
}


# -- JSON ------------------------------------------------------------------------------------------------------------


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = JSONDecoder(parse_constant=_no_constant)


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _NoCallError from error


def _values(text: str) -> list[Any]:
    """Return JSON objects that follow one another, with semicolons, commas or blanks between."""
    plain, begin = text.strip(), 0
    values: list[Any] = []
    while begin < len(plain) and len(values) < MOST_CALLS:
        try:
            value, end = _DECODER.raw_decode(plain, begin)
        except (JSONDecodeError, ValueError, RecursionError) as error:
            raise _NoCallError from error
        values.append(value)
        between = _BETWEEN.match(plain, end)
        begin = end if between is None else between.end()
    return values


def _call_of(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise _NoCallError
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise _NoCallError
    return ToolCall(value["name"], _json(arguments))


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except RecursionError as error:
        raise _NoCallError from error
    except UnicodeEncodeError:  # half of a pair of surrogates, which no answer can carry as it is
        return json.dumps(value)
    return text
