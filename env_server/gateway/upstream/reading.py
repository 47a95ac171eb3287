"""Reading replies of registered servers, whatever protocol they speak."""

import math
from collections.abc import Mapping
from typing import Any

import orjson

from clients.protocol.arrays import INTEGER_LIMIT, DecodeError
from clients.protocol.values import decode_value
from env_server.gateway.upstream.base import UpstreamError

_MAX_DEPTH = 200


def read_number(name: str, reply: Mapping[str, Any]) -> float:
    """A finite number.

    Raises:
        UpstreamError: It is something else.
    """
    value = reply.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise UpstreamError(f"the {name} is not a finite number")
    return float(value)


def read_info(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The info.

    Raises:
        UpstreamError: It is no object, or holds what cannot be read.
    """
    info = reply.get("info", {})
    if not isinstance(info, dict):
        raise UpstreamError("the info is not an object")
    try:
        decoded: Mapping[str, Any] = decode_value(None, info)
    except DecodeError as error:
        raise UpstreamError(f"the info cannot be read: {error}") from error
    return decoded


def read_foreign_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The info of a server that does not know our protocol's limits: larger integers, such as times in nanoseconds,
    become text.

    Raises:
        UpstreamError: It holds what cannot be read.
    """
    return read_info({"info": _within_limits(info, _MAX_DEPTH)})


def _within_limits(value: Any, depth: int) -> Any:
    if type(value) is int and not -INTEGER_LIMIT < value < INTEGER_LIMIT:
        return str(value)
    if not depth:
        # What is nested deeper is refused in any case.
        return value
    if isinstance(value, dict):
        return {name: _within_limits(each, depth - 1) for name, each in value.items()}
    if isinstance(value, list):
        return [_within_limits(each, depth - 1) for each in value]
    return value


def as_text(value: Any) -> str:
    """An observation as text: what is no text is its JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
