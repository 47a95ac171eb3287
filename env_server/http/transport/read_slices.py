"""Reads one connection in slices, so that a megabyte of tiny requests or frames does not block the others.

The event loop delivers all bytes that a connection has received, which may take seconds to parse.
"""

import asyncio
from collections.abc import Callable
from time import perf_counter

from rollgym.env_server.common.admissions import Admissions
from rollgym.env_server.common.event_loop import SLICE_S

SLICE_BYTES = 8192
"""As many bytes are looked at without a look at the clock."""


class ReadSlices:
    """The data of one connection that was received but not yet parsed.

    Args:
        admissions: In which turn of the loop data is taken in.
        transport: The connection; nothing more is read from it while there is data.
        feed: Parses a slice.
        is_over: Whether all further data is discarded.
        has_to_wait: Whether the parsed requests must be answered first; `go_on` is called then.
        reads_on: Whether to read more from the connection once all data is parsed.
    """

    def __init__(
        self,
        admissions: Admissions,
        transport: asyncio.Transport,
        *,
        feed: Callable[[bytes], None],
        is_over: Callable[[], bool],
        has_to_wait: Callable[[], bool],
        reads_on: Callable[[], bool],
    ) -> None:
        self._admissions = admissions
        self._transport = transport
        self._feed = feed
        self._is_over = is_over
        self._has_to_wait = has_to_wait
        self._reads_on = reads_on
        self._data = b""
        self._at = 0
        self._is_scheduled = False

    @property
    def are_left(self) -> bool:
        """Whether there is data that was not taken in yet."""
        return self._at < len(self._data)

    def take(self, data: bytes) -> None:
        """Parse data, or keep it until earlier data is parsed."""
        if self.are_left:
            self._data = self._data[self._at :] + data
            self._at = 0
            self._transport.pause_reading()
            return
        self._data, self._at = data, 0
        if self._admissions.are_open():
            self._take_slices()
        else:
            self.go_on()

    @property
    def are_in_line(self) -> bool:
        """Whether it is this server that is behind with data that was received."""
        return self._is_scheduled

    def go_on(self) -> None:
        """Take in what is left, at the next turn of the loop that has time for it."""
        if self.are_left and not self._is_scheduled:
            self._is_scheduled = True
            self._transport.pause_reading()
            self._admissions.call(self._next_turn)

    def drop(self) -> None:
        """Discard the data that remains."""
        self._data, self._at = b"", 0

    def _next_turn(self) -> None:
        self._is_scheduled = False
        if not self.are_left:
            return
        if self._is_over():
            self.drop()
        elif not self._has_to_wait() and self._take_slices() and self._reads_on():
            self._transport.resume_reading()

    def _take_slices(self) -> bool:
        """Take in slices, as long as it may take; whether all is taken in, and more may come."""
        end = perf_counter() + SLICE_S
        while self.are_left:
            piece = self._data[self._at : self._at + SLICE_BYTES]
            self._at += len(piece)
            self._feed(piece)
            if self._is_over():
                self.drop()
                return False
            if self._has_to_wait():
                if self.are_left:
                    self._transport.pause_reading()
                return not self.are_left
            if perf_counter() >= end:
                self.go_on()
                return not self.are_left
        self.drop()
        return True
