"""JSON parsed exactly: integers beyond 64 bits, which a fast parser turns into floats, stay integers."""

from __future__ import annotations

import json
from typing import Any

import orjson

_DIGITS = bytes(ord("0") if chr(code) in "0123456789" else ord(" ") for code in range(256))
_LONG = b"0" * 19
"""Digits that an integer beyond 64 bits has at least."""
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


def _read_exactly(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except RecursionError as error:
        text = data if isinstance(data, str) else data.decode()
        raise orjson.JSONDecodeError("it is nested too deep", text, 0) from error
