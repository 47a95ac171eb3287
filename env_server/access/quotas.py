"""The quotas of tokens: sessions over all I/O processes of a server, and operations in a second."""

import fcntl
import math
import mmap
import os
import struct
import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.io_process import ProcessRank

ROWS = 4096
"""Names of tokens that are counted apart in the life of one server; those that come after share the last row."""

_CELL = struct.Struct("<q")
_NAMES = ROWS * 8
_FILE = "quota_counters"


class QuotaCounters:
    """Counts of sessions by I/O process and token.

    With several processes the counts lie in a small file that all of them map. Each process writes its own cells
    only, so no lock is needed. Two processes that count at one moment may together pass a limit by one session.

    Tokens come and go while the server runs, and each process reads the token file for itself: a table of hashed names
    at the start of the file assigns rows to tokens, and a new name is written there under a lock.

    Args:
        rank: Which process this is.
    """

    def __init__(self, rank: ProcessRank) -> None:
        size = _NAMES + rank.processes * ROWS * _CELL.size
        self._rows: dict[str, int] = {}
        self._descriptor: int | None = None
        if rank.processes > 1:
            if rank.directory is None:
                raise ValueError("several processes need a directory where they meet")
            self._memory = map_shared(rank.directory / _FILE, size)
            self._descriptor = os.open(rank.directory / _FILE, os.O_RDWR)
        else:
            self._memory = mmap.mmap(-1, size)
        self._names = np.frombuffer(self._memory, "<u8", ROWS)
        self._counts = np.frombuffer(self._memory, "<i8", rank.processes * ROWS, _NAMES).reshape(-1, ROWS)
        self._own = self._counts[rank.index]
        self._own[:] = 0

    def add(self, name: str, count: int) -> None:
        """Count sessions of a token made (or, negative, ended) in this process."""
        self._own[self._row(name)] += count

    def of_token(self, name: str) -> int:
        """Sessions of one token in all processes."""
        return int(self._counts[:, self._row(name)].sum())

    def total(self) -> int:
        """The number of sessions in all processes."""
        return int(self._counts.sum())

    def close(self) -> None:
        """Unmap and close the file."""
        del self._names, self._counts, self._own
        self._memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _row(self, name: str) -> int:
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._find_row(name)
        return row

    def _find_row(self, name: str) -> int:
        mark = int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) | 1
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            # Rows are filled in their order, so the first empty one ends the search.
            taken = (self._names == mark) | (self._names == 0)
            row = int(taken.argmax()) if taken.any() else ROWS - 1
            if self._names[row] == 0:
                self._names[row] = mark
            return row
        finally:
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def start_quota_counters(directory: Path) -> None:
    """Forget the counts and names of a server that met here before; none of its processes runs any more."""
    (directory / _FILE).unlink(missing_ok=True)


def map_shared(path: Path, size: int) -> mmap.mmap:
    """Map a file of at least `size` bytes that the processes of a server share; missing bytes are zeros."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class RateLimit:
    """One bucket for each token; it holds one second's worth of operations.

    Args:
        rate: Operations a second for tokens whose entry says nothing; None for no limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._buckets: dict[str, tuple[float, float]] = {}

    def of(self, caller: Caller) -> float | None:
        """How many operations a second a caller has; None for no limit."""
        return caller.quota.rate_limit or self._rate

    def take(self, caller: Caller) -> None:
        """Count one operation.

        Raises:
            ProblemError: `rate_limited`.
        """
        rate = self.of(caller)
        if rate is None:
            return
        now = time.monotonic()
        size = max(1.0, rate)
        level, filled_at = self._buckets.get(caller.name, (size, now))
        level = min(size, level + (now - filled_at) * rate)
        if level < 1.0:
            self._buckets[caller.name] = (level, now)
            raise ProblemError(
                "rate_limited",
                f"this token may call {rate:g} operations a second",
                retry_after=max(1, math.ceil((1.0 - level) / rate)),
            )
        self._buckets[caller.name] = (level - 1.0, now)
