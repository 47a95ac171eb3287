"""How trainers whose models act by calling tools play any text environment: by its own tools, and one tool for text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.tool_calls import (
    ToolCall,
    ToolDeclaration,
    call_format_of,
)
from rollgym.clients.replies.formats.table import declared_tools, written_calls

OVER = "The episode is over."

_ACT = ToolDeclaration(
    "act",
    "Take an action.",
    {
        "type": "object",
        "properties": {
            "action": {
                "type": "string",
                "description": "The reply with the action, in the form that the instruction gives.",
            }
        },
        "required": ["action"],
    },
)
_REPLY = ToolDeclaration(
    "reply",
    "Say something that is not a call of a tool, such as the answer.",
    {
        "type": "object",
        "properties": {"text": {"type": "string", "description": "What is said."}},
        "required": ["text"],
    },
)
_TEXT_OF = {_ACT.name: "action", _REPLY.name: "text"}


def playable_tools(info: Mapping[str, Any]) -> list[ToolDeclaration]:
    """Return the tools by which an environment is played.

    These are its own and `reply`, for what is not a call; or the one tool `act`, where it is played by text.

    Args:
        info: The `info` of a reset.

    Raises:
        ValueError: A tool of the environment has one of these names.
    """
    own = declared_tools(info)
    if taken := [tool.name for tool in own if tool.name in _TEXT_OF]:
        raise ValueError(
            f"the environment's tool {taken[0]!r} has the name of a tool that is added: rename it"
        )
    return [*own, _REPLY] if own else [_ACT]


def opening_text(observation: str, info: Mapping[str, Any]) -> str:
    """Return what the model is told first: the instruction, how to act, and the first observation."""
    has_tools = bool(declared_tools(info))
    told = info.get("rules", info.get("instruction")) if has_tools else info.get("instruction")
    how = (
        "Call the tools. What is not a call of a tool, such as an answer, goes into the tool `reply`."
        if has_tools
        # The instruction is the environment's and asks for a reply: this says where that goes, so there is one form.
        else "Here you reply by calling the tool `act`: its argument `action` is the reply that is asked for above, "
        "and it returns what you observe next. Text outside a call is no action."
    )
    return "\n\n".join(part for part in (told, how, observation) if part)


def action_of(name: str, arguments: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """Return the action that a call of a playable tool stands for.

    Args:
        name: One of `playable_tools`.
        arguments: Its arguments.
        info: The `info` of the reset.

    Raises:
        UnwritableCallError: The environment's format has no form for the call.
    """
    if name in _TEXT_OF:
        return str(arguments.get(_TEXT_OF[name], ""))
    schemas = {tool.name: tool.parameters for tool in declared_tools(info)}
    return written_calls(call_format_of(info), [ToolCall(name, arguments)], schemas=schemas)
