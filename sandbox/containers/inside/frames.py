"""The frames between the host and the first process of a container."""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Iterator

HEADER = struct.Struct(">BI")
"""The header of a frame: its kind, and the size of its content."""

# From the host: a run (JSON; the bytes of its files and of its standard input follow), input of a session, its end.
RUN, INPUT, STOP = 1, 2, 3
# To the host: ready for a run (JSON), output of a session, result of a run (JSON; its streams and files follow).
READY, OUTPUT, RESULT = 4, 5, 6

CHUNK = 64 * 1024


def frame(kind: int, payload: bytes) -> bytes:
    """A frame as it goes over a stream."""
    return HEADER.pack(kind, len(payload)) + payload


class Host:
    """The two streams that lead to the host."""

    def __init__(self) -> None:
        self._received = bytearray()
        self.unsent = bytearray()

    def chunks(self, size: int) -> Iterator[bytes]:
        """The next bytes, in pieces."""
        while size > 0:
            if not self._received:
                self.read_some()
            piece = bytes(self._received[: min(size, CHUNK)])
            del self._received[: len(piece)]
            size -= len(piece)
            yield piece

    def frame(self) -> tuple[int, bytes]:
        """The next frame; waits for it."""
        kind, size = HEADER.unpack(b"".join(self.chunks(HEADER.size)))
        return kind, b"".join(self.chunks(size))

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Yield the frames that have arrived completely."""
        while len(self._received) >= HEADER.size:
            _, size = HEADER.unpack_from(self._received)
            if len(self._received) < HEADER.size + size:
                return
            yield self.frame()

    def read_some(self) -> None:
        """Wait until bytes can be read, and read them."""
        data = os.read(0, CHUNK)
        if not data:
            # The host is gone, and this container with it.
            sys.exit(0)
        self._received += data

    def send(self, data: bytes) -> None:
        """Send everything; waits for it."""
        self.unsent += data
        os.set_blocking(1, True)
        while self.unsent:
            self.send_some()

    def send_some(self) -> None:
        """Send as much as possible without waiting."""
        try:
            del self.unsent[: os.write(1, self.unsent[:CHUNK])]
        except BlockingIOError:
            return
