"""JSON parsed exactly: integers beyond 64 bits, which a fast parser turns into floats, stay integers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import orjson

_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else ord(" ") for code in range(256))
_LONG = b"0" * 19
"""Digits that an integer beyond 64 bits has at least."""
DEEPEST = 200
"""How deep what others say may be nested, so that all who walk through it can. Values of the wire are bounded alike."""
_NESTED = (dict, list, tuple)
_STRIDE = 6
_SAMPLED = b"0" * (len(_LONG) // _STRIDE)
"""The digits of such an integer in a sample of every sixth byte, at least."""


def read_json(data: bytes | str) -> Any:
    """Parse a JSON value; integers are exact, however large.

    Raises:
        orjson.JSONDecodeError: It is not valid JSON; this includes what Python's own parser accepts, such as NaN and
            lone surrogates.
    """
    value = orjson.loads(data)
    # This runs for every frame, so a sample is tested first: an expression takes six times as long. Texts may hold
    # them, too. And `find`: to `in`, which allows integers, bytes are first of all a wrong integer.
    content = data.encode() if isinstance(data, str) else data
    if (
        content[::_STRIDE].translate(_DIGITS).find(_SAMPLED) >= 0
        and content.translate(_DIGITS).find(_LONG) >= 0
    ):
        return _read_exactly(data)
    return value


def read_shallow_json(data: bytes | str) -> Any:
    """Read a value of JSON exactly that the caller walks through afterwards.

    Raises:
        orjson.JSONDecodeError: It is no JSON, or nested deeper than `DEEPEST`.
    """
    value = read_json(data)
    brackets = (
        data.count("[") + data.count("{") if isinstance(data, str) else data.count(b"[") + data.count(b"{")
    )
    # Few brackets cannot be deep, and cost no look.
    if brackets > DEEPEST and not is_shallow(value):
        raise _too_deep(data)
    return value


def write_json(value: Any) -> bytes:
    """Write plain data as JSON in which integers are exact, however large.

    Raises:
        TypeError: It holds what JSON has no form for, or is nested too deep.
        ValueError: It holds a number or a character that JSON has no form for.
    """
    try:
        text = orjson.dumps(value)
        # It writes a null for NaN.
        if b"null" in text and not _is_finite(value):
            raise ValueError("NaN and infinite numbers have no form in JSON")
        return text
    except orjson.JSONEncodeError:
        if not is_shallow(value):
            raise
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def is_shallow(value: Any) -> bool:
    """Whether plain data is nested no deeper than `DEEPEST`."""
    level = [value]
    for _ in range(DEEPEST):
        level = [part for each in level for part in _parts(each) if isinstance(part, _NESTED)]
        if not level:
            return True
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, _NESTED) else ()


def _is_finite(value: Any) -> bool:
    """Whether all numbers in plain data are finite."""
    level = [value]
    while level:
        if not all(math.isfinite(each) for each in level if isinstance(each, float)):
            return False
        level = [part for each in level for part in _parts(each)]
    return True


def _too_deep(data: bytes | str) -> orjson.JSONDecodeError:
    text = data if isinstance(data, str) else data.decode()
    return orjson.JSONDecodeError("it is nested too deep", text, 0)


def _read_exactly(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        raise _too_deep(data) from error
