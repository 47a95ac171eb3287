"""Which kwargs a client may set."""

from collections.abc import Mapping
from typing import Any

import jsonschema
from jsonschema import Draft202012Validator

from clients.protocol.errors import ProblemError
from clients.protocol.values import DecodeError, decode_value
from env_server.configuration import ConfigurationError

NO_KWARGS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of an environment that says nothing: a client sets nothing."""

_MAX_ERRORS = 20
_MAX_REASON = 300


class KwargsRules:
    """The JSON Schema of what a client may set, and the names that only the operator sets.

    Args:
        env_id: The environment, for messages.
        schema: JSON Schema of an object.
        operator_kwargs: Names that are refused in requests, whatever the schema says.

    Raises:
        ConfigurationError: If the schema is not one.
    """

    def __init__(self, env_id: str, schema: Mapping[str, Any], operator_kwargs: frozenset[str]) -> None:
        try:
            Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigurationError(
                f"the kwargs schema of {env_id} is not a JSON Schema: {error.message}"
            ) from error
        self.schema = dict(schema)
        self._env_id = env_id
        self._operator_kwargs = operator_kwargs
        self._validator = Draft202012Validator(schema)

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse kwargs that a client may not set.

        Raises:
            ProblemError: `invalid_kwargs`, with the fields and reasons in `errors`.
        """
        if not kwargs:
            return
        errors = [
            {"field": f"kwargs.{name}", "reason": "is set by the operator of the server only"}
            for name in sorted(self._operator_kwargs & kwargs.keys())
        ]
        try:
            decode_value(None, kwargs)
        except DecodeError as error:
            errors.append({"field": "kwargs", "reason": str(error)})
        for misfit in self._validator.iter_errors(kwargs):
            field = ".".join(["kwargs", *(str(part) for part in misfit.absolute_path)])
            errors.append({"field": field, "reason": misfit.message[:_MAX_REASON]})
            if len(errors) >= _MAX_ERRORS:
                break
        if errors:
            raise ProblemError(
                "invalid_kwargs",
                f"{self._env_id} refuses {errors[0]['field']}: {errors[0]['reason']}",
                errors=errors,
            )
