"""Which kwargs a client may set."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cached_property
from itertools import islice
from typing import Any

import jsonschema
import orjson
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from clients.protocol.errors import ProblemError
from clients.protocol.values import DecodeError, decode_value
from env_server.common.settings import ConfigurationError

NO_KWARGS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""The schema of an environment that says nothing: a client sets nothing."""

_MAX_ERRORS = 20
_MOST_NAMES = 20
_MAX_REASON = 300
_LARGEST_SCHEMA = 64 * 1024
_MOST_LOOKS = 20_000
_NAMES = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
_WORDS = frozenset({"title", "description", "$comment", "format"})
_VALUES = frozenset({"const", "enum", "default", "examples"})


# JSON Schema takes 4.0 for an integer; a constructor in Python does not.
_Strict: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    ),
)


class _TooMuch(Exception):  # noqa: N818 - never leaves this module
    """Holding kwargs against a schema takes more than it may."""


class KwargsRules:
    """The JSON Schema of what a client may set, and the names that only the operator sets.

    Args:
        env_id: The environment, for messages.
        schema: JSON Schema of an object; or a function that gives it when it is needed first, and then has to be one.
        operator_kwargs: Names that are refused in requests, whatever the schema says.
        trusted: Whether the schema is the operator's or an installed package's. That of a registered server is bounded
            in size and work, and its regular expressions, which can run for ever, are left to that server.

    Raises:
        ConfigurationError: If the schema is not one.
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
        self._looks = 0
        if not callable(schema):
            self._check_schema(schema)

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of what a client may set."""
        return dict(self._declared() if callable(self._declared) else self._declared)

    @cached_property
    def _validator(self) -> Any:
        # By itself, the library would fetch what a `$ref` names, wherever that is.
        if self._trusted:
            return _Strict(self.schema, registry=Registry())
        return self._frugal()(_without_patterns(self.schema), registry=Registry())

    def _check_schema(self, schema: Mapping[str, Any]) -> None:
        try:
            if not self._trusted and len(orjson.dumps(schema)) > _LARGEST_SCHEMA:
                raise ConfigurationError(
                    f"the kwargs schema of {self._env_id} is over {_LARGEST_SCHEMA} bytes"
                )
            Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ConfigurationError(
                f"the kwargs schema of {self._env_id} is not a JSON Schema: {error.message}"
            ) from error
        except (RecursionError, TypeError) as error:
            raise ConfigurationError(
                f"the kwargs schema of {self._env_id} cannot be read: {error}"
            ) from error

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
        except DecodeError as error:
            errors.append({"field": "kwargs", "reason": str(error)})
        errors.extend({"field": field, "reason": "is not finite"} for field in _not_finite(kwargs))
        self._looks = 0
        try:
            for misfit in self._validator.iter_errors(kwargs):
                errors.extend(islice(_told(misfit, reserved), _MAX_ERRORS))
                if len(errors) >= _MAX_ERRORS:
                    break
        except (Unresolvable, RecursionError, _TooMuch):
            reason = "the environment's schema cannot be followed for these; its author has to mend it"
            errors.append({"field": "kwargs", "reason": reason})
        if errors:
            raise ProblemError(
                "invalid_kwargs",
                f"{self._env_id} refuses {errors[0]['field']}: {errors[0]['reason']}",
                errors=errors[:_MAX_ERRORS],
            )

    def _frugal(self) -> Any:
        """A validator that counts how often it looks at something, and gives up."""

        def counted(keyword: Any) -> Any:
            def look(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
                self._looks += 1
                if self._looks > _MOST_LOOKS:
                    raise _TooMuch
                yield from keyword(validator, value, instance, schema) or ()

            return look

        keywords = {name: counted(keyword) for name, keyword in Draft202012Validator.VALIDATORS.items()}
        return extend(Draft202012Validator, keywords)  # type: ignore[no-untyped-call]


def _told(misfit: Any, reserved: Set[str]) -> Iterator[dict[str, str]]:
    """What does not fit, as the fields and reasons of a problem; names that there are not, one by one."""
    path = ["kwargs", *(str(part) for part in misfit.absolute_path)]
    if misfit.validator != "additionalProperties" or "patternProperties" in misfit.schema:
        yield {"field": ".".join(path), "reason": misfit.message[:_MAX_REASON]}
        return
    named = misfit.schema.get("properties", {})
    for name in misfit.instance:
        if name not in named and (len(path) > 1 or name not in reserved):
            yield {"field": ".".join([*path, name])[:_MAX_REASON], "reason": _unknown(name, named)}


def _not_finite(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """The fields of numbers that are NaN or infinite, which binary messages can have and bounds do not hold."""
    waiting: list[tuple[str, Any]] = [("kwargs", kwargs)]
    while waiting:
        field, value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            yield field[:_MAX_REASON]
        elif isinstance(value, Mapping):
            waiting.extend((f"{field[:_MAX_REASON]}.{name}", part) for name, part in value.items())
        elif isinstance(value, list | tuple):
            waiting.extend((f"{field[:_MAX_REASON]}.{index}", part) for index, part in enumerate(value))


def _unknown(name: str, named: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, named, n=1) if len(name) <= _MAX_REASON else []
    if near:
        return f"there is no such kwarg; did you mean {near[0]!r}?"
    names = ", ".join(list(named)[:_MOST_NAMES]) or "none"
    return f"there is no such kwarg; there are {names}"[:_MAX_REASON]


def without_descriptions(schema: Any, *, names: bool = False) -> Any:
    """What a schema allows and what its defaults are, without the words on it."""
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


def _without_patterns(schema: Any, *, names: bool = False) -> Any:
    """A schema without regular expressions, and without what is said of names that match none of them.

    Nor has it `$schema`, by which its parts would be held by validators that count nothing.
    """
    if isinstance(schema, list):
        return [_without_patterns(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    if names:
        return {name: _without_patterns(part) for name, part in schema.items()}
    dropped = {"pattern", "patternProperties", "$schema"}
    if "patternProperties" in schema:
        dropped |= {"additionalProperties", "unevaluatedProperties"}
    return {
        name: part if name in _VALUES else _without_patterns(part, names=name in _NAMES)
        for name, part in schema.items()
        if name not in dropped
    }
