"""Bytes and images on the wire: content with its media type."""

from __future__ import annotations

import base64
from typing import Any

from clients.protocol.arrays import DecodeError, decode_bytes

OCTETS = "application/octet-stream"
"""The media type of bytes that say nothing about themselves."""


class MediaBytes(bytes):
    """Bytes that know their media type, such as an image in `info` or a rendered frame.

    Args:
        content: The bytes.
        media_type: Their media type, such as `image/png`.
    """

    media_type: str

    def __new__(cls, content: bytes | bytearray | memoryview, media_type: str = OCTETS) -> MediaBytes:
        """Make a copy of the content and label it."""
        labelled = super().__new__(cls, content)
        labelled.media_type = media_type
        return labelled

    def __reduce__(self) -> tuple[Any, ...]:
        return MediaBytes, (bytes(self), self.media_type)


def encode_media(content: bytes | bytearray | memoryview, *, binary: bool) -> dict[str, Any]:
    """Encode bytes as `{"__bytes__": [media type, content]}`."""
    media_type = content.media_type if isinstance(content, MediaBytes) else OCTETS
    plain = bytes(content)
    return {"__bytes__": [media_type, plain if binary else base64.b64encode(plain).decode("ascii")]}


def decode_media(wire: dict[str, Any]) -> bytes:
    """Decode bytes: plain `bytes` where the media type says nothing, `MediaBytes` otherwise.

    Raises:
        DecodeError: The object does not fit its schema.
    """
    fields = wire.get("__bytes__")
    if not isinstance(fields, list) or len(fields) != 2 or not isinstance(fields[0], str):
        raise DecodeError('bytes are {"__bytes__": [media type, content]}')
    content = decode_bytes(fields[1])
    return content if fields[0] == OCTETS else MediaBytes(content, fields[0])
