"""The formats of Mistral: a JSON list after [TOOL_CALLS], or names with [ARGS] and an object each."""

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
    parse_arguments,
    parse_name,
    said_around,
    split_at_mark,
)
from rollgym.clients.replies.json_values import (
    CallFault,
    as_json,
    as_json_of_calls,
    behind_blanks,
    json_end,
    parse_json,
)

_MARK = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_BLANKS = re.compile(r"\s*+")
_BARE = re.compile(r"\A\[\s*+\{")
_LIST = re.compile(r"\A\s*+\[(?!ARGS\]|CALL_ID\])")
# Decoders that leave special tokens out leave out the mark between name and arguments.
_NAME_AND_ARGUMENTS = re.compile(r"\s*+[\w.:-]{1,256}+\s*+(?=\{)")
_CALL_ID = re.compile(r"\[CALL_ID\](\w+)\s*\Z")


def _read(text: str, schemas: Schemas, strict: bool) -> Reading:
    content, mark, said = split_at_mark(text.strip().removesuffix("</s>"), _MARK, _BLANKS)
    if not mark:
        # The mark is a special token, which decoders often leave out.
        if not _is_meant(content, schemas):
            return Reading(content=content.strip(), remaining=text)
        content, said = "", content
    if _LIST.match(said) is None and (_ARGUMENTS in said or _NAME_AND_ARGUMENTS.match(said)):
        *others, last = _parts(said)
        last, behind = (last, "") if strict else _split_behind(last, _behind_name(last, 0, len(last)))
        parts = [*others, last]
        return collect_whole(
            text, said_around(content, behind), [partial(_named_call, part, strict) for part in parts]
        )
    said, behind = (said, "") if strict else _split_behind(said, 0)
    try:
        value = parse_json(said, strict=strict)
        if isinstance(value, dict) and not strict:
            value = [value]
        if not isinstance(value, list) or not value:
            raise CallFault(f"after {_MARK} a JSON list of calls is wanted")
    except CallFault as fault:
        return Reading((), content.strip(), (str(fault),), text)
    readers = [partial(call_of_object, item, "arguments", strict=strict) for item in value]
    return collect_whole(text, said_around(content, behind), readers)


def _split_behind(text: str, place: int | None) -> tuple[str, str]:
    """Split a text behind the JSON at a place: what was said behind calls is not part of them."""
    end = None if place is None else json_end(text, place)
    return (text, "") if end is None else (text[:end], text[end:])


def _is_meant(text: str, schemas: Schemas) -> bool:
    """Whether a text without the mark is a list of calls, or the attempt at one."""
    if _BARE.match(text) is None or '"name"' not in text:
        return False
    end = json_end(text, 0)
    if end is None:
        return '"arguments"' in text or '"parameters"' in text
    try:
        items = parse_json(text[:end], strict=False)
    except CallFault:
        return True
    return is_meant_as_call(items[0], schemas)


def _parts(text: str) -> list[str]:
    """Cut named calls apart, at the marks that stand in none of their texts."""
    parts: list[str] = []
    begin = 0
    while begin <= len(text) and len(parts) < MOST_CANDIDATES:
        stop = _part_end(text, begin)
        parts.append(text[begin:stop])
        begin = stop + len(_MARK)
    return parts


def _part_end(text: str, begin: int) -> int:
    following = text.find(_MARK, begin)
    stop = following if following >= 0 else len(text)
    place = _behind_name(text, begin, stop)
    end = None if place is None else json_end(text, place)
    if end is None or end <= stop:
        return stop
    # The mark that was found stands in a text of the arguments.
    behind = behind_blanks(text, end)
    following = behind if text.startswith(_MARK, behind) else text.find(_MARK, end)
    return following if following >= 0 else len(text)


def _behind_name(text: str, begin: int, stop: int) -> int | None:
    """Return where the arguments of a named call begin."""
    named = _NAME_AND_ARGUMENTS.match(text, begin, stop)
    if named is not None:
        return named.end()
    mark = text.find(_ARGUMENTS, begin, stop)
    return mark + len(_ARGUMENTS) if mark >= 0 else None


def _named_call(part: str, strict: bool) -> ToolCall:
    place = _behind_name(part, 0, len(part))
    if place is None:
        raise CallFault(f"the call of {parse_name(part)} has no {_ARGUMENTS}")
    head, arguments = part[:place].removesuffix(_ARGUMENTS), part[place:]
    found = _CALL_ID.search(head)
    name = head if found is None else head[: found.start()]
    return ToolCall(
        parse_name(name),
        parse_arguments(parse_json(arguments, strict=strict), strict=strict),
        "" if found is None else found[1],
    )


def _write(calls: Sequence[ToolCall], content: str, schemas: Schemas) -> str:
    # Mistral's templates want ids of nine letters and digits.
    items = [
        {"name": call.name, "arguments": dict(call.arguments), "id": call.id or f"{number:09d}"}
        for number, call in enumerate(calls)
    ]
    return content + _MARK + as_json_of_calls(items)


def _show_result(name: str, content: str) -> str:
    return f"[TOOL_RESULTS]{as_json({'content': content})}[/TOOL_RESULTS]"


def _explain(schemas: Schemas) -> str:
    return (
        f"To call tools, write {_MARK} and a JSON list of objects with a name and arguments, and nothing after it, "
        f'for example:\n{_MARK}[{{"name": "tool", "arguments": {{"parameter": "value"}}}}]'
    )


def _tag(name: str, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    # Without the mark, a control token that grammars have no name for.
    return json_tag(f'{{"name": {as_json(name)}, "arguments": ', schema, "}")


MISTRAL = CallFormat(
    "mistral",
    _read,
    _write,
    _explain,
    _show_result,
    mark=_MARK,
    bare="[{",
    whole=True,
    grammar=CallGrammar(_tag, opening="[", separator=", ", closing="]"),
    template_marks=(_MARK,),
    form='`[TOOL_CALLS][{"name", "arguments", "id"}]`, `[TOOL_CALLS]name[ARGS]{...}`, or the list alone',
    used_by="Mistral",
)
