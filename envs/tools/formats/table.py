"""All formats of tool calls by name."""

from collections.abc import Mapping
from types import MappingProxyType

from rollgym.envs.tools.formats.calls import CallFormat
from rollgym.envs.tools.formats.hermes import HERMES
from rollgym.envs.tools.formats.llama import LLAMA
from rollgym.envs.tools.formats.mistral import MISTRAL
from rollgym.envs.tools.formats.openai import OPENAI
from rollgym.envs.tools.formats.python_calls import PYTHON_CALLS
from rollgym.envs.tools.formats.qwen_xml import QWEN_XML
from rollgym.envs.tools.formats.tags import TAGS

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
