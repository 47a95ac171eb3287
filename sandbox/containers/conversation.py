"""The exchange with the process in a container: frames over the attached streams, which Docker frames once more."""

import contextlib
import select
import socket
import ssl
import struct
import time

from rollgym.sandbox.containers.inside.frames import HEADER, frame

_DOCKER_HEADER = struct.Struct(">BxxxI")
_STANDARD_OUTPUT = 1
_CHUNK = 256 * 1024
_COMPLAINT_BYTES = 2000
# The bound of received but unread bytes.
_KEPT_BYTES = 4 * 1024 * 1024
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ConversationEndedError(Exception):
    """The process in the container is gone; the text is the end of its standard error."""


class Conversation:
    """The host's end of it. One thread at a time may use it.

    Args:
        attached: The socket that Docker has given for the container's three streams.
    """

    def __init__(self, attached: socket.socket) -> None:
        self._socket = attached
        attached.setblocking(False)
        self._raw = bytearray()
        self._received = bytearray()
        self._complaint = b""
        self._ended = False

    def send(
        self, kind: int, payload: bytes, *parts: bytes, deadline: float, held_until: float = 0.0
    ) -> None:
        """Send a frame and what follows it.

        Incoming bytes are read at the same time, to avoid a deadlock: the other side may block in a write until we
        read.

        Args:
            kind: The kind of the frame.
            payload: Its content.
            parts: Raw bytes that follow it.
            deadline: When all of it must have been sent.
            held_until: Until then, incoming bytes are read only up to the buffer's bound; a peer that writes but never
                reads gets back-pressure.

        Raises:
            TimeoutError: If it could not be sent by the deadline.
            ConversationEndedError: If the container's process has ended.
        """
        for part in (frame(kind, payload), *parts):
            view = memoryview(part)
            while view:
                if self.held >= _KEPT_BYTES and not self._can_write(min(deadline, held_until)):
                    if time.monotonic() >= deadline:
                        raise TimeoutError("the process in the container takes nothing more")
                    self._wait(deadline, write=True)
                elif self.held < _KEPT_BYTES:
                    self._wait(deadline, write=True)
                try:
                    view = view[self._socket.send(view[:_CHUNK]) :]
                except _NOT_YET:
                    continue
                except OSError as error:
                    raise self._end() from error

    def frame(self, deadline: float) -> tuple[int, bytes]:
        """Wait for the next frame and return it.

        Raises:
            TimeoutError: If it does not arrive in time.
            ConversationEndedError: If the container's process has ended.
        """
        kind, size = HEADER.unpack(self.exactly(HEADER.size, deadline))
        return kind, self.exactly(size, deadline)

    def exactly(self, size: int, deadline: float) -> bytes:
        """Wait for the next bytes and return them.

        Raises:
            TimeoutError: If they do not arrive in time.
            ConversationEndedError: If the container's process has ended.
        """
        while len(self._received) < size:
            if self._ended:
                raise self._end()
            self._wait(deadline)
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def has_frame(self, deadline: float) -> bool:
        """Whether a frame arrives before the deadline; True for a broken connection, whose read then fails."""
        with contextlib.suppress(TimeoutError):
            while not (self._ended or self._has_whole_frame()):
                self._wait(deadline)
        return self._ended or self._has_whole_frame()

    def hang_up(self) -> None:
        """Close the connection from any thread; waiting calls then raise `ConversationEndedError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket to the container."""
        self._socket.close()

    def _has_whole_frame(self) -> bool:
        if len(self._received) < HEADER.size:
            return False
        _, size = HEADER.unpack_from(self._received)
        return len(self._received) >= HEADER.size + int(size)

    def _end(self) -> ConversationEndedError:
        lines = self._complaint.decode(errors="replace").strip().splitlines()
        return ConversationEndedError(lines[-1] if lines else "the container has ended")

    @property
    def held(self) -> int:
        """The number of received but unread bytes."""
        return len(self._raw) + len(self._received)

    def _can_write(self, deadline: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _wait(self, deadline: float, *, write: bool = False) -> None:
        """Wait until the socket is readable, or writable; read the available bytes."""
        poller = select.poll()
        wanted = (0 if self._ended else select.POLLIN) | (select.POLLOUT if write else 0)
        poller.register(self._socket, wanted)
        events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            raise TimeoutError("the process in the container does not answer")
        if events[0][1] & ~select.POLLOUT and not self._ended:
            self._take()

    def _take(self) -> None:
        try:
            # TLS may hold more bytes than the socket shows.
            while data := self._socket.recv(_CHUNK):
                self._raw += data
                if len(self._raw) > _KEPT_BYTES and not getattr(self._socket, "pending", int)():
                    break
            else:
                self._ended = True
        except _NOT_YET:
            pass
        except OSError:
            self._ended = True
        position = 0
        while len(self._raw) - position >= _DOCKER_HEADER.size:
            stream, size = _DOCKER_HEADER.unpack_from(self._raw, position)
            begin = position + _DOCKER_HEADER.size
            if len(self._raw) < begin + size:
                break
            if stream == _STANDARD_OUTPUT:
                self._received += self._raw[begin : begin + size]
            else:
                self._complaint = (self._complaint + self._raw[begin : begin + size])[-_COMPLAINT_BYTES:]
            position = begin + size
        del self._raw[:position]
