"""Whole numbers in JSON, which may be written as 3 or as 3.0: JSON Schema takes both for integers."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator


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
