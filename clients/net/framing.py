"""Frames of a WebSocket (RFC 6455, section 5): messages of one frame, without the way through a whole protocol.

Nearly all that two ends of ours say to each other are text or binary messages of one frame. The sans-I/O protocol of
`websockets` needs some twenty calls to read or write one of them, which is a good part of what a step costs. They are
read and written here. All else goes to that protocol, byte for byte and in order: handshakes, fragments, control
frames, compressed messages, and whatever is too large or wrong.
"""

import struct
from collections.abc import Callable, Iterator
from os import urandom

from websockets.protocol import SERVER, Protocol, State

try:
    from websockets.speedups import apply_mask
except ImportError:  # no build of it for this platform
    from websockets.utils import apply_mask

TEXT = 0x1
BINARY = 0x2

_CONTINUATION = 0x0
_FINAL = 0x80
_OPCODE = 0x0F
_WHOLE = (_FINAL | TEXT, _FINAL | BINARY)
_MASKED = 0x80
_SIZE = 0x7F
_IN_TWO_BYTES = 126
_KEYS = 256

_SHORT = struct.Struct("!BB").pack
_MIDDLE = struct.Struct("!BBH").pack
_LONG = struct.Struct("!BBQ").pack


class FrameReader:
    """Reads what comes behind the handshake.

    Args:
        protocol: What reads all that is not a message of one frame.
        most_bytes: A larger message is left to the protocol, which refuses it.
        on_message: Called with the opcode and the content of each message of one frame.
        pass_on: Called with what is for the protocol.

    Attributes:
        most_bytes: As above; it may change at any time.
    """

    __slots__ = (
        "_head",
        "_is_masked",
        "_is_message_open",
        "_on_message",
        "_owed",
        "_pass_on",
        "_protocol",
        "most_bytes",
    )

    def __init__(
        self,
        protocol: Protocol,
        *,
        most_bytes: int,
        on_message: Callable[[int, bytes], None],
        pass_on: Callable[[bytes], None],
    ) -> None:
        self._protocol = protocol
        self.most_bytes = most_bytes
        self._on_message = on_message
        self._pass_on = pass_on
        self._is_masked = protocol.side is SERVER
        self._head = b""
        self._owed = 0
        self._is_message_open = False

    def feed(self, data: bytes) -> None:
        """Read what came, which may begin and end within a frame."""
        if self._head:
            data, self._head = self._head + data, b""
        at = passed = 0
        end = len(data)
        while at < end:
            if self._owed:
                piece = min(self._owed, end - at)
                self._owed -= piece
                at += piece
                continue
            bounds = _bounds(data, at, end)
            if bounds is None:
                self._head = data[at:]
                end = at
                break
            start, stop = bounds
            if stop <= end and self._is_plain(data[at], data[at + 1], stop - start):
                if passed < at:
                    # This may end the connection, and then this frame is the protocol's to discard.
                    self._pass_on(data[passed:at])
                    passed = at
                if self._protocol.state is State.OPEN:
                    content = data[start:stop]
                    if self._is_masked:
                        content = apply_mask(content, data[start - 4 : start])
                    self._on_message(data[at] & _OPCODE, content)
                    at = passed = stop
                    continue
            self._note(data[at])
            self._owed = stop - at
        if passed < end:
            self._pass_on(data[passed:end])

    def _is_plain(self, first: int, second: int, size: int) -> bool:
        """Whether a frame is a message that needs nothing of the protocol."""
        return (
            first in _WHOLE
            and (second >= _MASKED) is self._is_masked
            and size <= self.most_bytes
            and not self._is_message_open
            and not self._protocol.extensions
            and not self._protocol.debug
        )

    def _note(self, first: int) -> None:
        """Note which message is open: one in fragments ends with the last of them, with control frames between."""
        opcode = first & _OPCODE
        if opcode == _CONTINUATION:
            self._is_message_open = self._is_message_open and first < _FINAL
        elif opcode in (TEXT, BINARY):
            self._is_message_open = first < _FINAL


def _bounds(data: bytes, at: int, end: int) -> tuple[int, int] | None:
    """Where the content of a frame begins and ends; None if the frame's head has not come whole."""
    if end - at < 2:
        return None
    size = data[at + 1] & _SIZE
    start = at + 2
    if size >= _IN_TWO_BYTES:
        start += 2 if size == _IN_TWO_BYTES else 8
        if end < start:
            return None
        size = int.from_bytes(data[at + 2 : start], "big")
    if data[at + 1] >= _MASKED:
        start += 4
    return start, start + size


def to_client(opcode: int, content: bytes) -> bytes:
    """Return the frame of a server's message."""
    return _head(opcode, len(content), 0) + content


def to_server(opcode: int, content: bytes, key: bytes) -> bytes:
    """Return the frame of a client's message, masked with a key of four bytes."""
    return _head(opcode, len(content), _MASKED) + key + apply_mask(content, key)


def _head(opcode: int, size: int, masked: int) -> bytes:
    if size < _IN_TWO_BYTES:
        return _SHORT(_FINAL | opcode, masked | size)
    if size < 2**16:
        return _MIDDLE(_FINAL | opcode, masked | _IN_TWO_BYTES, size)
    return _LONG(_FINAL | opcode, masked | _SIZE, size)


def masking_keys() -> Iterator[bytes]:
    """Keys that nobody can predict (section 10.3); the system is asked for many at once, since each call costs."""
    while True:
        keys = urandom(4 * _KEYS)
        for at in range(0, len(keys), 4):
            yield keys[at : at + 4]
