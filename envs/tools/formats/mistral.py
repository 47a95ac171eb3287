"""The formats of Mistral: a JSON list after [TOOL_CALLS], or names with [ARGS] and an object each."""

import re
from collections.abc import Callable
from functools import partial

from rollgym.clients.protocol.tool_calls import ToolCall, as_json
from rollgym.envs.tools.formats.calls import (
    CallFault,
    CallFormat,
    Reading,
    Schemas,
    call_of_object,
    collect,
    parse_arguments,
    parse_json,
    parse_name,
)

_MARK = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_BARE = re.compile(r"\A\[\s*\{")
_CALL_ID = re.compile(r"\[CALL_ID\](\w+)\s*\Z")


def _read(text: str, schemas: Schemas) -> Reading:
    content, mark, said = text.strip().removesuffix("</s>").partition(_MARK)
    if not mark:
        # The mark is a special token, which decoders are often told to leave out.
        if not (_BARE.match(content) and '"name"' in content):
            return Reading(content=content.strip())
        content, said = "", content
    if _ARGUMENTS in said:
        return collect([_named(part) for part in said.split(_MARK)], content)
    try:
        value = parse_json(said)
        if not isinstance(value, list) or not value:
            raise CallFault(f"after {_MARK} a JSON list of calls is wanted")
    except CallFault as fault:
        return Reading((), content.strip(), (str(fault),))
    return collect([partial(call_of_object, item, "arguments") for item in value], content)


def _named(part: str) -> Callable[[], ToolCall]:
    def read() -> ToolCall:
        head, mark, arguments = part.partition(_ARGUMENTS)
        if not mark:
            raise CallFault(f"the call of {parse_name(head)} has no {_ARGUMENTS}")
        found = _CALL_ID.search(head)
        name = head if found is None else head[: found.start()]
        return ToolCall(
            parse_name(name), parse_arguments(parse_json(arguments)), "" if found is None else found[1]
        )

    return read


def _show_result(name: str, content: str) -> str:
    return f"[TOOL_RESULTS]{as_json({'content': content})}[/TOOL_RESULTS]"


def _explain(schemas: Schemas) -> str:
    return (
        f"To call tools, write {_MARK} and a JSON list of objects with a name and arguments, and nothing after it, "
        f'for example:\n{_MARK}[{{"name": "tool", "arguments": {{"parameter": "value"}}}}]'
    )


MISTRAL = CallFormat("mistral", _read, _explain, _show_result)
