"""The kwargs that a client may set."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from itertools import islice
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.values import DecodeError, decode_value
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.envs.core.json_schemas import SchemaValidator
from rollgym.envs.core.patterns import TooMuchWorkError
from rollgym.envs.core.schema_parts import SchemaError
from rollgym.suggestions import near_names

NO_KWARGS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of an environment that says nothing: a client sets nothing."""

_MAX_ERRORS = 20
_MOST_NAMES = 20
_MAX_REASON = 300
_NAMES = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
_WORDS = frozenset({"title", "description", "$comment", "format"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


class KwargsRules:
    """The JSON Schema of a client's kwargs, and the names that only the operator sets.

    Args:
        env_id: The environment, for messages.
        schema: JSON Schema of an object; or a function that gives it when it is needed first, and then has to be one.
        operator_kwargs: Names that are refused in requests, whatever the schema says.
        trusted: Whether the schema is the operator's or an installed package's. That of a registered server is bounded
            in size and work; its regular expressions, which would hold up whatever else this process does, are left to
            that server.

    Raises:
        ConfigurationError: If the schema is not one, or cannot be followed.
    """

    def __init__(
        self,
        env_id: str,
        schema: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        operator_kwargs: frozenset[str],
        *,
        trusted: bool = True,
    ) -> None:
        self._env_id = env_id
        self._declared = schema
        self._operator_kwargs = operator_kwargs
        self._trusted = trusted
        if not callable(schema):
            try:
                _ = self._validator
            except SchemaError as error:
                raise ConfigurationError(f"the kwargs schema of {env_id} cannot be used: {error}") from error

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the kwargs that a client may set."""
        return dict(self._declared() if callable(self._declared) else self._declared)

    @cached_property
    def _validator(self) -> SchemaValidator:
        # JSON Schema accepts 4.0 as an integer; a Python constructor does not.
        return SchemaValidator(
            self.schema, trusted=self._trusted, strict_integers=self._trusted, match_patterns=self._trusted
        )

    def check(self, kwargs: Mapping[str, Any]) -> None:
        """Refuse kwargs that a client may not set.

        Raises:
            ProblemError: `invalid_kwargs`, with the fields and reasons in `errors`.
        """
        if not kwargs:
            return
        reserved = self._operator_kwargs & kwargs.keys()
        errors = [
            {"field": f"kwargs.{name}", "reason": "is set by the operator of the server only"}
            for name in sorted(reserved)
        ]
        try:
            decode_value(None, kwargs)
            for misfit in self._validator.misfits(kwargs):
                errors.extend(islice(_told(misfit, reserved), _MAX_ERRORS))
                if len(errors) >= _MAX_ERRORS:
                    break
        except DecodeError as error:
            errors.append({"field": "kwargs", "reason": str(error)})
        except TooMuchWorkError as error:
            errors.append({"field": "kwargs", "reason": f"the schema cannot be followed for these: {error}"})
        if errors:
            del errors[_MAX_ERRORS:]
            raise ProblemError("invalid_kwargs", f"{self._env_id} refuses {_joined(errors)}", errors=errors)


def _told(misfit: Any, reserved: Set[str]) -> Iterator[dict[str, str]]:
    """The violations, as fields and reasons of a problem; unknown names one by one."""
    path = ["kwargs", *(str(part) for part in misfit.absolute_path)]
    if misfit.validator != "additionalProperties" or "patternProperties" in misfit.schema:
        yield {"field": ".".join(path)[:_MAX_REASON], "reason": misfit.message[:_MAX_REASON]}
        return
    named = misfit.schema.get("properties", {})
    for name in misfit.instance:
        if name not in named and (len(path) > 1 or name not in reserved):
            yield {"field": ".".join([*path, name])[:_MAX_REASON], "reason": _unknown(name, named)}


def _joined(errors: Iterable[Mapping[str, str]]) -> str:
    """All violations in one text; a reason that several fields share is given once."""
    fields: dict[str, list[str]] = {}
    for error in errors:
        fields.setdefault(error["reason"], []).append(error["field"])
    return "; ".join(f"{', '.join(refused)}: {reason}" for reason, refused in fields.items())


def _unknown(name: str, named: Mapping[str, Any]) -> str:
    near = near_names(name, named)
    if near:
        return f"there is no such kwarg; did you mean {near[0]!r}?"
    names = ", ".join(list(named)[:_MOST_NAMES]) or "none"
    return f"there is no such kwarg; there are {names}"[:_MAX_REASON]


def without_descriptions(schema: Any, *, names: bool = False) -> Any:
    """A schema's constraints and defaults, without its descriptions."""
    if isinstance(schema, list):
        return [without_descriptions(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: part
        if name in _VALUES and not names
        else without_descriptions(part, names=name in _NAMES and not names)
        for name, part in schema.items()
        if names or name not in _WORDS
    }
