"""All formats of tool calls by name, and the tools that an environment declares in the `info` of a reset."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.clients.protocol.tool_calls import ToolCall, ToolDeclaration, call_format_of
from rollgym.clients.replies.formats.calls import CallFormat, Schemas
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.formats.llama import LLAMA
from rollgym.clients.replies.formats.mistral import MISTRAL
from rollgym.clients.replies.formats.openai import OPENAI
from rollgym.clients.replies.formats.python_calls import PYTHON_CALLS
from rollgym.clients.replies.formats.qwen_xml import QWEN_XML
from rollgym.clients.replies.formats.tags import TAGS
from rollgym.extensions import Capabilities

GROUP = "rollgym.call_formats"
OURS = (MISTRAL, QWEN_XML, HERMES, LLAMA, OPENAI, PYTHON_CALLS, TAGS)
"""Ours. A chat template that has the marks of several writes the first: Qwen's XML stands between Hermes' marks."""


class CallFormats(Capabilities[CallFormat]):
    """Formats by name: ours, then those that packages add by an entry point of `rollgym.call_formats`.

    Args:
        ours: Those that ship.
    """

    def __init__(self, ours: Sequence[CallFormat]) -> None:
        super().__init__("call format", GROUP, CallFormat, ours)

    def of_templates(self) -> list[str]:
        """Return the formats that chat templates of models write; packages', which are narrower, come first.

        Raises:
            ValueError: A package's format is broken.
        """
        added = self.added()
        return [
            name
            for name in (*added, *(each for each in self if each not in added))
            if self[name].template_marks
        ]


FORMATS = CallFormats(OURS)
"""All formats."""


def format_named(name: str) -> CallFormat:
    """Return a format.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(f"call_format must be one of {', '.join(FORMATS)}, not {name!r}")
    return FORMATS[name]


def written_calls(
    call_format: str, calls: Sequence[ToolCall], content: str = "", schemas: Schemas | None = None
) -> str:
    """Write calls as one action; see `CallFormat.write`.

    Raises:
        ValueError: No such format.
        UnwritableCallError: The format has no form for them.
    """
    return format_named(call_format).write(calls, content, schemas)


def declared_tools(info: Mapping[str, Any]) -> list[ToolDeclaration]:
    """Return the tools that an environment declares at a reset.

    Declarations without a name are left out, and so are all if the environment reads calls in a format that neither we
    nor an installed package can write.

    Args:
        info: The `info` of a reset.
    """
    tools = info.get("tools")
    if call_format_of(info) not in FORMATS or not isinstance(tools, Sequence) or isinstance(tools, str):
        return []
    found: dict[str, ToolDeclaration] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name:
            continue
        parameters = function.get("parameters")
        if not isinstance(parameters, Mapping):
            parameters = {"type": "object", "properties": {}}
        found[name] = ToolDeclaration(name, str(function.get("description") or ""), parameters)
    return list(found.values())
