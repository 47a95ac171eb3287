"""The quotas of tokens: sessions over all I/O processes of a server, operations in a second, and open sockets."""

import fcntl
import math
import mmap
import os
import struct
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.settings import AccessSettings

ROWS = 4096
"""Names of tokens that are counted apart in the life of one server; those that come after share the last row."""

_CELL = struct.Struct("<q")
_NAMES = ROWS * 8
_FILE = "quota_counters"
_RETRY_AFTER_S = 5


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


class ConnectionSlot:
    """One socket's slot among the open ones.

    Attributes:
        caller: The socket's owner; None until its token has arrived.
        address: The client's address.
        revoked: Whether its token was revoked: no frame is answered any more.
        on_change: Called when the caller has changed or was revoked.
    """

    __slots__ = ("address", "caller", "on_change", "revoked")

    def __init__(self, address: str) -> None:
        self.address = address
        self.caller: Caller | None = None
        self.revoked = False
        self.on_change: Callable[[], None] | None = None


class OpenSockets:
    """The open sockets of one I/O process.

    Args:
        settings: How many a token and an address may have.
    """

    def __init__(self, settings: AccessSettings) -> None:
        self._per_token = settings.max_sockets_per_token
        self._strangers_per_address = settings.max_unauthenticated_sockets
        self._slots: set[ConnectionSlot] = set()
        self._of_token: Counter[str] = Counter()
        self._strangers: Counter[str] = Counter()

    def enter(self, caller: Caller | None, address: str) -> ConnectionSlot:
        """Take a slot for a new socket, whose token may not have arrived yet.

        Raises:
            ProblemError: `at_capacity`.
        """
        slot = ConnectionSlot(address)
        if caller is not None:
            self._count(caller)
            slot.caller = caller
        else:
            if self._strangers[address] >= self._strangers_per_address:
                raise ProblemError(
                    "at_capacity",
                    f"{self._strangers_per_address} sockets of this address have sent no token yet",
                    retry_after=_RETRY_AFTER_S,
                    limit="max_unauthenticated_sockets",
                )
            self._strangers[address] += 1
        self._slots.add(slot)
        return slot

    def identify(self, slot: ConnectionSlot, caller: Caller) -> None:
        """Note whose token has come on a socket.

        Raises:
            ProblemError: `at_capacity`.
        """
        self._count(caller)
        self._forget_stranger(slot.address)
        slot.caller = caller

    def leave(self, slot: ConnectionSlot) -> None:
        """Release the slot of a closed socket."""
        self._slots.discard(slot)
        if slot.caller is None:
            self._forget_stranger(slot.address)
            return
        name = slot.caller.name
        self._of_token[name] -= 1
        if not self._of_token[name]:
            del self._of_token[name]

    def look_again(self, tokens: Tokens) -> None:
        """Notify the sockets whose tokens were revoked, or whose roles have changed."""
        for slot in list(self._slots):
            if slot.caller is None:
                continue
            caller = tokens.again(slot.caller)
            if caller is None or caller.name != slot.caller.name or not _plays(caller):
                slot.revoked = True
            else:
                slot.caller = caller
            if slot.on_change is not None:
                slot.on_change()

    def _count(self, caller: Caller) -> None:
        limit = caller.quota.max_sockets or self._per_token
        if self._of_token[caller.name] >= limit:
            raise ProblemError(
                "at_capacity",
                f"this token has its {limit} sockets",
                retry_after=_RETRY_AFTER_S,
                limit="max_sockets_per_token",
            )
        self._of_token[caller.name] += 1

    def _forget_stranger(self, address: str) -> None:
        self._strangers[address] -= 1
        if not self._strangers[address]:
            del self._strangers[address]


def _plays(caller: Caller) -> bool:
    return "play" in caller.roles or caller.is_admin
