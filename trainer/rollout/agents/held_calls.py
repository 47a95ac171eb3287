"""The constraint on a reply if an agent wants calls of tools, or offers tools beside a form for answers.

As vLLM and SGLang have it: a call that must be made looks as the family writes it, with arguments by the tool's schema;
beside a form the reply is either calls or an answer. Nothing here does I/O.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.clients.replies.formats.calls import CallGrammar
from rollgym.trainer.inference.base import StructuredOutput
from rollgym.trainer.rollout.agents.calls import AgentCall
from rollgym.trainer.rollout.agents.replies import FAMILIES, ToolFormat
from rollgym.trainer.rollout.agents.structured import Wanted, is_deep, plain_schema

_MOST_BYTES = 1 << 17
"""Of all tools that may be called."""
_NO_PARAMETERS = {"type": "object", "properties": {}}
_Format = Mapping[str, Any]


def held_reply(call: AgentCall, tool_format: ToolFormat) -> tuple[Wanted | None, tuple[str, ...]]:
    """Return the constraint on a request's reply, and the fields that are ignored if no constraint is possible.

    Args:
        call: The request.
        tool_format: The policy family's format of tool calls.
    """
    wanted = call.wishes.structured
    asked = () if wanted is None else (wanted.param,)
    if call.must_call:
        spare = ("tool_choice", *asked)
        held = _held_to_calls(call, tool_format, spare)
    elif wanted is not None and call.reads_tools:
        spare = asked
        held = _held_to_either(call, tool_format, wanted)
    else:
        return wanted, ()
    return held, (() if held is not None else spare)


def _held_to_calls(call: AgentCall, tool_format: ToolFormat, spare: tuple[str, ...]) -> Wanted | None:
    grammar = FAMILIES[tool_format].grammar
    tags = None if grammar is None else _tags(grammar, call.tools, call.must_call)
    if grammar is None or tags is None:
        return None
    return _wanted(_calls(grammar, tags, several=call.parallel_tools), Wanted(_NOTHING, "tool_choice", spare))


def _held_to_either(call: AgentCall, tool_format: ToolFormat, wanted: Wanted) -> Wanted | None:
    """Hold a reply to calls of tools or to an answer; None if the two cannot be distinguished by how they begin."""
    grammar = FAMILIES[tool_format].grammar
    if grammar is None or not grammar.marked or wanted.output.kind != "json":
        return None
    tags = _tags(grammar, call.tools, [tool["function"]["name"] for tool in call.tools])
    if tags is None:
        return None
    answer = {"type": "json_schema", "json_schema": json.loads(wanted.output.text)}
    either = {"type": "or", "elements": [_calls(grammar, tags, several=call.parallel_tools), answer]}
    begins = tuple(grammar.opening + tag["begin"] for tag in tags)
    return _wanted(either, Wanted(_NOTHING, wanted.param, (wanted.param,), begins))


_NOTHING = StructuredOutput("structural_tag", "")


def _wanted(form: _Format, wanted: Wanted) -> Wanted | None:
    try:
        text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except ValueError:  # a number or half a character that JSON has no form for
        return None
    output = StructuredOutput("structural_tag", text)
    return Wanted(output, wanted.param, wanted.spare, wanted.begins) if size <= _MOST_BYTES else None


def _tags(
    grammar: CallGrammar, tools: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[_Format] | None:
    """Return the tags of calls of tools; None if one of them has none."""
    tags = []
    for function in (tool["function"] for tool in tools):
        schema = function.get("parameters", _NO_PARAMETERS)
        if function["name"] not in names:
            continue
        tag = None if is_deep(schema) else _tag(grammar, function, schema)
        if tag is None:
            return None
        tags.append(tag)
    return tags or None


def _tag(grammar: CallGrammar, function: Mapping[str, Any], schema: Any) -> Mapping[str, Any] | None:
    try:
        plain = plain_schema(schema)
        return grammar.tag(function["name"], plain) if isinstance(plain, Mapping) else None
    except (TypeError, ValueError):  # a name that JSON has no form for
        return None


def _calls(grammar: CallGrammar, tags: Sequence[_Format], *, several: bool) -> _Format:
    calls = {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": grammar.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    if not grammar.opening:
        return calls
    opening, closing = (
        {"type": "const_string", "value": each} for each in (grammar.opening, grammar.closing)
    )
    return {"type": "sequence", "elements": [opening, calls, closing]}
