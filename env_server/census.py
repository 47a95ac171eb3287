"""How many sessions each token has in each I/O process: the quotas of the whole server."""

import mmap
import os
import struct
from pathlib import Path

from env_server.seat import Seat

_CELL = struct.Struct("<q")
_FILE = "census"


class Census:
    """Counts of sessions by I/O process and token.

    With several processes the counts lie in a small file that all of them map. Each process writes its own cells
    only, so no lock is needed. Two processes that count at one moment may together pass a limit by one session.

    Args:
        seat: Which process this is.
        tokens: How many tokens there are.
    """

    def __init__(self, seat: Seat, tokens: int) -> None:
        self._tokens = tokens
        self._processes = seat.processes
        self._own = seat.index * tokens
        size = seat.processes * tokens * _CELL.size
        if seat.processes > 1:
            if seat.directory is None:
                raise ValueError("several processes need a directory where they meet")
            self._cells = map_shared(seat.directory / _FILE, size)
        else:
            self._cells = mmap.mmap(-1, size)
        for row in range(tokens):
            _CELL.pack_into(self._cells, (self._own + row) * _CELL.size, 0)

    def add(self, row: int, count: int) -> None:
        """Count sessions of a token made (or, negative, ended) in this process."""
        offset = (self._own + row) * _CELL.size
        (value,) = _CELL.unpack_from(self._cells, offset)
        _CELL.pack_into(self._cells, offset, value + count)

    def of_token(self, row: int) -> int:
        """Sessions of one token in all processes."""
        return sum(self._cell(process, row) for process in range(self._processes))

    def total(self) -> int:
        """Sessions in all processes."""
        return sum(
            self._cell(process, row) for process in range(self._processes) for row in range(self._tokens)
        )

    def close(self) -> None:
        """Let go of the file."""
        self._cells.close()

    def _cell(self, process: int, row: int) -> int:
        (value,) = _CELL.unpack_from(self._cells, (process * self._tokens + row) * _CELL.size)
        return int(value)


def map_shared(path: Path, size: int) -> mmap.mmap:
    """Map a file of at least a size that the processes of a server share; it is made, all zeros, where it is not."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
