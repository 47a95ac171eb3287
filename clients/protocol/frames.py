"""Frames: plain data to bytes and back, as JSON or MessagePack."""

from __future__ import annotations

from typing import Any, cast

import msgpack
import orjson

from rollgym.clients.protocol.arrays import DecodeError, EncodeError
from rollgym.clients.protocol.json_text import read_json

MEDIA_TYPES = {False: "application/json", True: "application/msgpack"}
"""The HTTP content type by `binary`."""

SUBPROTOCOLS = {False: "rollgym.v1.json", True: "rollgym.v1.msgpack"}
"""The WebSocket subprotocol by `binary`."""

_names = {False: "JSON", True: "MessagePack"}


def dumps(obj: Any, *, binary: bool) -> bytes:
    """Serialise plain data; values went through `encode_value` before.

    Raises:
        EncodeError: It contains a value that the encoding cannot represent: too deeply nested lists, numbers or texts
            out of range, objects. Encodings differ in what they bear, so that what was read as one may be no other.
    """
    try:
        if binary:
            # Only a packer that keeps its output returns None, and this one does not.
            return cast(bytes, msgpack.packb(obj))
        return orjson.dumps(obj)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EncodeError(f"cannot be written as {_names[binary]}: {error}") from error


def loads(data: bytes | str, *, binary: bool) -> Any:
    """Read plain data from a frame.

    Integers are exact in either encoding, even beyond the range of values; the decoder of values refuses those.

    Raises:
        DecodeError: The frame is not valid JSON or MessagePack, or uses a MessagePack extension type.
    """
    try:
        if binary:
            return msgpack.unpackb(data, ext_hook=_refuse_extension, timestamp=0)
        return read_json(data)
    except DecodeError:
        raise
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise DecodeError(f"not a valid {_names[binary]} frame: {error}") from error


def _refuse_extension(code: int, data: bytes) -> Any:
    raise DecodeError(f"MessagePack extension type {code} is not part of the protocol")
