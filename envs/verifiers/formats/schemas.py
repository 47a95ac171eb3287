"""JSON by the schema of a task."""

import json
from typing import Any, NoReturn

from rollgym.clients.replies.marks import unfenced
from rollgym.envs.core.json_schemas import SchemaValidator
from rollgym.envs.verifiers.formats.reply import Reply

_LONGEST_JSON = 200_000


def schema(value: Any) -> SchemaValidator:
    """Read a JSON Schema (2020-12)."""
    return SchemaValidator(value)


def json_schema(reply: Reply, schema: SchemaValidator) -> float:
    """Whether what is said, fenced or not, is JSON that a schema allows.

    Raises:
        TooMuchWorkError: Holding one against the other takes too much work.
    """
    if len(reply.spoken) > _LONGEST_JSON:
        return 0.0
    try:
        value = json.loads(unfenced(reply.spoken), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(schema.fits(value))


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
