"""Messages between the processes of a run: a JSON head, raw bytes and descriptors, over a Unix stream socket."""

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PREFIX = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_MOST_DESCRIPTORS = 8
_MOST_BYTES = 1 << 30


class FrameError(ValueError):
    """The received bytes are not a message."""


@dataclass(frozen=True, slots=True)
class SupervisorMessage:
    """One message.

    Attributes:
        head: Its JSON object.
        blobs: Raw bytes that belong to it.
        descriptors: Open files that came with it; the receiver closes them.
    """

    head: Mapping[str, Any]
    blobs: Sequence[bytes] = ()
    descriptors: Sequence[int] = field(default=())

    def close(self) -> None:
        """Close the descriptors that came with it."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def send_frame(
    connection: socket.socket,
    head: Mapping[str, Any],
    blobs: Sequence[bytes] = (),
    descriptors: Sequence[int] = (),
) -> None:
    """Send a message.

    Raises:
        OSError: If the other end is gone.
    """
    text = json.dumps(head).encode()
    prefix = _PREFIX.pack(len(text), len(blobs)) + b"".join(_SIZE.pack(len(blob)) for blob in blobs) + text
    sent = socket.send_fds(connection, [prefix], list(descriptors)) if descriptors else 0
    connection.sendall(prefix[sent:])
    for blob in blobs:
        connection.sendall(blob)


def receive_frame(connection: socket.socket, most_bytes: int = _MOST_BYTES) -> SupervisorMessage | None:
    """Wait for a message; None at the end of the stream.

    Raises:
        FrameError: If the bytes are not a message, or one of more than `most_bytes`.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, _PREFIX.size, _MOST_DESCRIPTORS)
    if not data:
        return None
    try:
        text_size, blob_count = _PREFIX.unpack(data + _exactly(connection, _PREFIX.size - len(data)))
        if text_size > most_bytes or blob_count * _SIZE.size > most_bytes:
            raise FrameError("a message is too long")
        sizes = _exactly(connection, blob_count * _SIZE.size)
        text = _exactly(connection, text_size)
        lengths = [length for (length,) in _SIZE.iter_unpack(sizes)]
        if sum(lengths) > most_bytes:
            raise FrameError("a message is too long")
        head = json.loads(text)
        if not isinstance(head, dict):
            raise FrameError("its head is no object")
        return SupervisorMessage(head, [_exactly(connection, length) for length in lengths], descriptors)
    except (FrameError, ValueError, OSError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise FrameError(f"a message is broken: {error}") from error


def _exactly(connection: socket.socket, count: int) -> bytes:
    """Read exactly this many bytes."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise FrameError("the stream ended within a message")
        parts += part
    return bytes(parts)
