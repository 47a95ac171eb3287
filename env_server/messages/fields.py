"""The fields of a frame: the envelope's and the operation's own."""

from collections.abc import Mapping
from typing import Any

from env_server.messages.validation import invalid

ENVELOPE = frozenset({"id", "op", "session_id", "traceparent"})
"""Fields of a frame that are not the operation's own."""


def own_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a frame that are the operation's own."""
    return {name: value for name, value in fields.items() if name not in ENVELOPE}


def refuse_fields(fields: Mapping[str, Any]) -> None:
    """Refuse fields of a call that takes none.

    Raises:
        ProblemError: `invalid_request`.
    """
    for name in fields.keys() - ENVELOPE:
        raise invalid(name, "this call has no such field")
