"""Free-form values of requests: anything in JSON whose integers are exact in every reader; and whole numbers.

A whole number may be written as 3 or as 3.0: JSON Schema takes both for integers.

Only the schema says that a value is free. Nothing is validated here: `decode_value` refuses invalid values, once their
space is known.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import TypeAliasType

from rollgym.clients.protocol.arrays import INTEGER_LIMIT

_BOUNDS = Field(ge=1 - INTEGER_LIMIT, le=INTEGER_LIMIT - 1)
_MEANING = Field(
    description="Any JSON value. Integers of 2**53 and more, of either sign, are refused wherever they stand. A larger "
    "number is taken where it is written as a float (1e300), which JSON Schema cannot tell from an integer."
)
_Integer = Annotated[int, _BOUNDS]
_Float = Annotated[float, _BOUNDS]
# Integers are named beside floats, so that clients generated from the schema do not write 3 as 3.0.
FreeForm = TypeAliasType(
    "FreeForm",
    "Annotated[bool | _Integer | _Float | str | list[FreeForm] | dict[str, FreeForm] | None, _MEANING]",
)
"""The schema of each free-form value."""
_FORM = TypeAdapter(FreeForm)


class _Described:
    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return handler(_FORM.core_schema)


class _WithText:
    """Says that there is a text of this name in any case."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {**handler(schema), "properties": {self._name: {"type": "string"}}, "required": [self._name]}


FreeValue = Annotated[Any, _Described()]
"""Any JSON value: an action, an option."""

FreeFields = dict[str, FreeValue]
"""Values by their names: kwargs, options, arguments of a tool."""

VerifyItem = Annotated[FreeFields, _WithText("response")]
"""A response, and the fields of the task that it answers."""


def _as_integer(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


WHOLE = BeforeValidator(_as_integer)
"""Makes an integer of a float without a fraction, before a strict field validates it; booleans are unchanged."""


def _no_boolean(value: Any) -> Any:
    if type(value) is bool:
        raise ValueError("a boolean is not a number")
    return value


NO_BOOLEAN = BeforeValidator(_no_boolean)
"""Refuses booleans for a field of several allowed numbers: to Python, true is 1."""
