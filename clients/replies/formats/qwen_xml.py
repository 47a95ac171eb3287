"""The format of Qwen3-Coder: a tag for the function and one for each parameter, typed by the tool's schema."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    collect,
    parse_name,
    tag,
)
from rollgym.clients.replies.formats.hermes import show_result
from rollgym.clients.replies.formats.literals import ExpressionParser, literal_of
from rollgym.clients.replies.json_values import CallFault, as_json, parse_json, shown

_KINDS = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_TEXT = frozenset({"string"})
_MOST_PARTS = 64
"""So many parts of a schema are looked at."""
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")


def _kinds_of(schema: Any, root: Any = None) -> frozenset[str]:
    """Return the types that a schema allows; text alone if it names none.

    Args:
        schema: Of one value.
        root: Where its references lead: the schema of all arguments.
    """
    found: set[str] = set()
    waiting, followed = [schema], set[str]()
    for _ in range(_MOST_PARTS):
        if not waiting:
            break
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        found.update(_own_kinds(part))
        waiting += _alternatives(part)
        reference = part.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(_referred(reference, root))
    return frozenset(found) or _TEXT


def _kind_of(value: Any) -> frozenset[str]:
    """Return the names that schemas have for the type of a value."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    if isinstance(value, str):
        return _TEXT
    return frozenset({"array"} if isinstance(value, list) else {"object"})


def _own_kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types that a schema names itself, not by its alternatives or by reference."""
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        yield from _KINDS.intersection([kinds] if isinstance(kinds, str) else filter(_is_text, kinds))
    elif isinstance(schema.get("enum"), list):
        for value in schema["enum"][:_MOST_PARTS]:
            yield from _kind_of(value)
    elif "const" in schema:
        yield from _kind_of(schema["const"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _alternatives(schema: Mapping[str, Any]) -> list[Any]:
    lists = [schema[word] for word in _ALTERNATIVES if isinstance(schema.get(word), list)]
    return [part for parts in lists for part in parts[:_MOST_PARTS]]


def _referred(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference such as `#/$defs/Name` names; None if it names nothing."""
    if not reference.startswith("#/"):
        return None
    part = root
    for name in reference[2:].split("/", _MOST_PARTS):
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part


_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_CALL_OPENING = re.compile(r"<tool_call>\s*+<function=")
_CALL_CLOSING = re.compile(r"</function>\s*+</tool_call>")
_PARAMETER, _PARAMETER_END, _FUNCTION_END = "<parameter=", "</parameter>", "</function>"
# At the beginning, behind a closing mark, or where a line begins; anywhere else the mark is text.
_PARAMETER_OPENING = re.compile(
    r"(?P<follows>\A\s*+|</parameter>\s*+)<parameter=|\n[ \t]*+<parameter=(?P<name>[^>\n]*+)(?=>)"
)
_NOTHING = object()


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    parser = ExpressionParser()
    return collect(text, list(_candidates(text, partial(_call, schemas, parser, strict))))


def _candidates(text: str, read: Callable[[str], ToolCall]) -> Iterator[Candidate]:
    """Find calls: each ends at its last closing mark before the next call, so that its texts may hold marks.

    A call that the end of the reply cut off counts, as it does where this format comes from.
    """
    calls = (mark.start() for mark in _CALL_OPENING.finditer(text))
    following = next(calls, len(text))
    start = text.find(_OPENING)
    for _ in range(MOST_CANDIDATES):
        if start < 0:
            return
        begin = start + len(_OPENING)
        while following <= start:
            following = next(calls, len(text))
        end = _call_end(text, begin, following) if _CALL_OPENING.match(text, start) else _end(text, begin)
        yield Candidate(start, end, partial(read, text[begin:end].removesuffix(_CLOSING)))
        start = text.find(_OPENING, end)


def _call_end(text: str, begin: int, stop: int) -> int:
    end = -1
    for mark in _CALL_CLOSING.finditer(text, begin, stop):
        end = mark.end()
    if end < 0:
        closing = text.find(_CLOSING, begin, stop)
        end = closing + len(_CLOSING) if closing >= 0 else stop
    return end


def _end(text: str, begin: int) -> int:
    """Return where something in tool_call tags ends that is not a call."""
    following = text.find(_OPENING, begin)
    stop = following if following >= 0 else len(text)
    closing = text.find(_CLOSING, begin, stop)
    return closing + len(_CLOSING) if closing >= 0 else stop


def _call(schemas: Schemas, parser: ExpressionParser, strict: bool, body: str) -> ToolCall:
    head = _named(_before_last(body.partition("<function=")[2], _FUNCTION_END))
    if head is None:
        raise CallFault(f"the call {shown(body.strip())} has no <function=NAME>")
    name, said = parse_name(head[0]), head[1]
    schema = schemas.get(name, {})
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    arguments: dict[str, Any] = {}
    for key, value in _parameters(said, properties):
        if strict and key in arguments:
            raise CallFault(f"{shown(key)} is there twice")
        arguments[key] = _typed(value, _kinds_of(properties.get(key), schema), parser)
    return ToolCall(name, arguments)


def _parameters(said: str, properties: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Cut parameters apart: each ends at its last closing mark before the next one begins.

    One that is not closed ends where a line begins with another parameter of the tool.
    """
    openings = [
        mark
        for mark in itertools.islice(_PARAMETER_OPENING.finditer(said), MOST_CANDIDATES)
        if mark["follows"] is not None or not properties or mark["name"] in properties
    ]
    for mark, following in itertools.zip_longest(openings, openings[1:]):
        begin = mark.end() if mark["follows"] is not None else mark.start("name")
        part = _named(said[begin : following.start() if following else len(said)])
        if part is None:
            continue
        closed = following is not None and following["follows"] is not None
        value = part[1] if closed else _before_last(part[1], _PARAMETER_END)
        yield parse_name(part[0]), value.removeprefix("\n").removesuffix("\n")


def _before_last(text: str, mark: str) -> str:
    """Return what stands before the last closing mark; all of it if it was cut off."""
    before, found, rest = text.rpartition(mark)
    return before if found else rest


def _named(body: str) -> tuple[str, str] | None:
    """Split `NAME>what it holds`; None without a name."""
    name, mark, rest = body.partition(">")
    return (name, rest) if mark and "\n" not in name else None


def _typed(text: str, kinds: frozenset[str], parser: ExpressionParser) -> Any:
    """Return a value of the types that a schema allows.

    Where text is allowed, all is text but JSON of another type that is allowed, too. Otherwise numbers, booleans, lists
    and objects are JSON, or else literals of Python, as models write them. What is neither stays text: the caller
    the tool says what type was wanted.
    """
    others = kinds - {"string"}
    if not others:
        return text
    plain = text.strip()
    if "null" in kinds and plain.lower() in ("null", "none"):
        return None
    if "string" in kinds:
        value = _json_value(plain)
        return value if value is not _NOTHING and _kind_of(value) & others else text
    if plain.lower() in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[plain.lower()]
    value = _json_value(plain)
    if value is _NOTHING:
        with suppress(CallFault):
            return literal_of(parser.parse(plain), text_keys=False)
    return text if value is _NOTHING else value


def _json_value(text: str) -> Any:
    with suppress(CallFault):
        return parse_json(text)
    return _NOTHING


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    written = ["\n".join(_lines(call)) for call in calls]
    return "\n".join([content, *written] if content else written)


def _lines(call: ToolCall) -> Iterator[str]:
    yield from (_OPENING, f"<function={call.name}>")
    for name, value in call.arguments.items():
        yield from (f"{_PARAMETER}{name}>", _text_of(value), _PARAMETER_END)
    yield from (_FUNCTION_END, _CLOSING)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def _written_as(calls: Sequence[ToolCall]) -> tuple[Sequence[ToolCall], Schemas]:
    """Without schemas all is read as text, which values of other types are made of by their schema."""
    texts = [{name: _text_of(value) for name, value in call.arguments.items()} for call in calls]
    return [ToolCall(call.name, each) for call, each in zip(calls, texts, strict=True)], {}


def _explain(schemas: Schemas) -> str:
    return (
        "To call a tool, write its name and parameters as tags inside tool_call tags, for example:\n"
        "<tool_call>\n<function=tool>\n<parameter=parameter>\nvalue\n</parameter>\n</function>\n</tool_call>"
    )


_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties"})


def _tag(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the tag of a call: its parameters in the order of the schema, those that may be missing optional."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if (
        _COMBINED & schema.keys()
        or schema.get("type", "object") != "object"
        or not isinstance(properties, Mapping)
        or not isinstance(required, list)
        or any(">" in each or "\n" in each for each in (name, *properties))
    ):
        return None
    parts = [
        tag(f"{_PARAMETER}{key}>\n", _content(value, schema), f"\n{_PARAMETER_END}\n")
        for key, value in properties.items()
    ]
    chosen = [
        part if key in required else {"type": "optional", "content": part}
        for key, part in zip(properties, parts, strict=True)
    ]
    begin, function_end = f"{_OPENING}\n<function={name}>\n", f"{_FUNCTION_END}\n"
    if not chosen:
        return tag(begin, {"type": "const_string", "value": function_end}, _CLOSING)
    return tag(begin, {"type": "sequence", "elements": chosen}, function_end + _CLOSING)


def _content(value: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return how a parameter's value looks: text as it is, or JSON."""
    if "string" not in _kinds_of(value, schema):
        named = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return {"type": "json_schema", "json_schema": {**value, **named}}
    texts = value.get("enum") if isinstance(value, Mapping) else None
    if isinstance(texts, list) and texts and all(isinstance(each, str) and each for each in texts):
        constants = [{"type": "const_string", "value": each} for each in texts]
        return {"type": "or", "elements": constants}
    return {"type": "any_text"}


QWEN_XML = CallFormat(
    "qwen-xml",
    _read,
    _write,
    _explain,
    show_result,
    _written_as,
    mark=_OPENING,
    grammar=CallGrammar(_tag, separator="\n", marked=True),
    template_marks=("<function=",),
    form="`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`, typed by [the schema]"
    "(tool_call_formats.md#types-of-qwen-xml); the last call may be cut off",
    used_by="Qwen3-Coder",
)
