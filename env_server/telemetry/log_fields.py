"""What a record of the log says of the operation that it is about."""

from collections.abc import Mapping
from typing import Any

LOGGED = ("session_id", "env_id", "request_id")
"""Fields of operations that records carry. No others: what clients send may be private, and is large."""

_LONGEST = 128


def log_fields(fields: Mapping[str, Any]) -> dict[str, str]:
    """The `extra` of a record, from an operation's fields as they came."""
    return {name: value[:_LONGEST] for name in LOGGED if type(value := fields.get(name)) is str}
