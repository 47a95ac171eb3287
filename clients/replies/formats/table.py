"""All formats of tool calls by name."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import CallFormat, Schemas
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.formats.llama import LLAMA
from rollgym.clients.replies.formats.mistral import MISTRAL
from rollgym.clients.replies.formats.openai import OPENAI
from rollgym.clients.replies.formats.python_calls import PYTHON_CALLS
from rollgym.clients.replies.formats.qwen_xml import QWEN_XML
from rollgym.clients.replies.formats.tags import TAGS

FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {form.name: form for form in (HERMES, QWEN_XML, OPENAI, LLAMA, MISTRAL, PYTHON_CALLS, TAGS)}
)


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
