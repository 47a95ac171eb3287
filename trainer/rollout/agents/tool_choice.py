"""Which tools an agent wants called: `tool_choice`, as OpenAI's and Anthropic's APIs have it. Nothing here does I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.trainer.rollout.agents.errors import invalid

_FIELD = "tool_choice"
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of its tools a request wants the policy to call.

    Attributes:
        reads: Whether tools are offered, and calls of them looked for.
        must_call: Tools of which one at least must be called.
        one: Whether exactly one call is wanted.
        unread: The field, if it asks for something unsupported.
    """

    reads: bool = True
    must_call: tuple[str, ...] = ()
    one: bool = False
    unread: tuple[str, ...] = ()


def read_tool_choice(value: object, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return what a request's `tool_choice` asks for.

    Args:
        value: The field.
        tools: The tools that the request offers.

    Raises:
        ApiError: If it is malformed, or names a tool that is not offered.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    kind = value.get("type") if isinstance(value, Mapping) else value
    if value is None or kind == "auto":
        return ToolChoice()
    if kind == "none":
        return ToolChoice(reads=False)
    if kind in ("required", "any"):
        # Without offered tools, no call is possible.
        return ToolChoice(must_call=names, unread=() if names else (_FIELD,))
    if isinstance(value, Mapping):
        return _of_object(kind, value, names)
    raise invalid("tool_choice must be none, auto, required, or name a tool", _FIELD)


def _of_object(kind: object, value: Mapping[str, Any], names: tuple[str, ...]) -> ToolChoice:
    if kind in ("function", "tool"):
        return ToolChoice(must_call=(_offered(value, names),), one=True)
    if kind == "allowed_tools":
        return _of_allowed(value, names)
    return ToolChoice(unread=(_FIELD,))


def _of_allowed(value: Mapping[str, Any], names: tuple[str, ...]) -> ToolChoice:
    """Read a list of tools that alone may be called, as OpenAI has it."""
    nested = value.get("allowed_tools")
    holder = nested if isinstance(nested, Mapping) else value
    tools, mode = holder.get("tools"), holder.get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        raise invalid("tool_choice: allowed_tools need a mode, auto or required, and a list of tools", _FIELD)
    allowed = tuple(dict.fromkeys(_offered(each, names) for each in tools))
    if mode == "required":
        return ToolChoice(must_call=allowed)
    # A reply that need not call a tool is not constrained.
    return ToolChoice(unread=() if set(allowed) == set(names) else (_FIELD,))


def _offered(value: object, names: tuple[str, ...]) -> str:
    """Return the tool that is named, in either of the places that APIs have for its name."""
    holder = value.get("function", value) if isinstance(value, Mapping) else None
    name = holder.get("name") if isinstance(holder, Mapping) else None
    if not isinstance(name, str):
        raise invalid(
            "tool_choice must name a tool, such as {'type': 'function', 'function': {'name': 'a'}}", _FIELD
        )
    if name not in names:
        known = ", ".join(repr(each[:80]) for each in names[:_SHOWN]) or "none"
        more = "" if len(names) <= _SHOWN else f" and {len(names) - _SHOWN} more"
        raise invalid(f"tool_choice names the tool {name[:80]!r}; tools has {known}{more}", _FIELD)
    return name
