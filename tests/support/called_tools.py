"""Calls of tools that agents ask for by `tool_choice`."""

import json

import jsonschema

from tests.support.agent_talk import user

TURN = {
    "type": "object",
    "properties": {
        "way": {"enum": ["left", "right"]},
        "steps": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["way", "steps"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name, schema):
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("turn", TURN), tool("halt", EMPTY)]
NAMED = {"type": "function", "function": {"name": "turn"}}


def checked(calls):
    """The names of calls whose arguments are as their tools want them."""
    for each in calls:
        jsonschema.validate(
            json.loads(each.function.arguments), TURN if each.function.name == "turn" else EMPTY
        )
    return [each.function.name for each in calls]


async def asked(one, *, stream, **fields):
    """The choices of an answer, four at one time."""
    completions = one.openai.chat.completions
    fields = {"model": "policy", "messages": [user("Where to?")], "tools": TOOLS, "n": 4} | fields
    if stream:
        async with completions.stream(**fields) as events:
            return (await events.get_final_completion()).choices
    raw = await completions.with_raw_response.create(**fields)
    assert "x-rollgym-ignored" not in raw.headers
    return raw.parse().choices
