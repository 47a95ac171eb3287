"""Tools of a conversation as plain text, for chat templates that ignore them: in the form of the Hermes models."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.trainer.rollout.context import Message, prefixed

_OFFER = """You can call these tools, each described by a line of JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments in this form, once for each call:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_tools_in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a conversation whose first message offers the tools, and whose calls of them stand in their messages.

    Args:
        messages: The conversation.
        tools: Declarations, as chat templates have them.
    """
    written: list[Message] = [_with_calls(message) for message in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    offer = _OFFER.format(tools=lines)
    if written and written[0].get("role") == "system":
        first = written[0]
        return [{**first, "content": prefixed(first.get("content") or "", offer)}, *written[1:]]
    return [{"role": "system", "content": offer}, *written]


def _with_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [json.dumps(_plain(call.get("function", call)), ensure_ascii=False) for call in calls]
    marked = "\n".join(f"<tool_call>\n{line}\n</tool_call>" for line in lines)
    said = message.get("content") or ""
    content = f"{said}\n{marked}" if said else marked
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": content}


def _plain(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}
