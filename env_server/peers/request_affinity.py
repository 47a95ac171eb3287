"""The I/O process that answers a request and its retries, whichever process receives them."""

import mmap
import struct
from hashlib import blake2b

from rollgym.env_server.access.quotas import map_shared
from rollgym.env_server.common.io_process import ProcessRank

_SLOT = struct.Struct("<Q")
_SLOTS = 1 << 16
_INDEX_BITS = 16
_FILE = "affinity"


class RequestAffinity:
    """The process that each of the last requests was first sent to, by caller, operation and request id.

    A client that lost its connection retries its request over a new one, which may reach another process. With several
    processes, a table in a small file that all of them map says which one has the answer. Each request has one slot and
    overwrites the request that had it before; a forgotten request is carried out again. No lock is needed, because a
    slot is one word. Two requests with equal hashes are answered by one process, which tells them apart.

    Args:
        rank: Which process this is.
    """

    def __init__(self, rank: ProcessRank) -> None:
        self._rank = rank
        self._slots: mmap.mmap | None = None
        if rank.processes > 1:
            if rank.directory is None:
                raise ValueError("several processes need a directory where they meet")
            self._slots = map_shared(rank.directory / _FILE, _SLOTS * _SLOT.size)

    def elsewhere(self, caller: str, op: str, request_id: str) -> int | None:
        """The other process that answers a request; None for this one, which also takes requests without a process."""
        if self._slots is None:
            return None
        digest = blake2b("\0".join((caller, op, request_id)).encode(), digest_size=_SLOT.size).digest()
        (number,) = _SLOT.unpack(digest)
        offset = number % _SLOTS * _SLOT.size
        mark = number >> _INDEX_BITS
        (held,) = _SLOT.unpack_from(self._slots, offset)
        # Indices count from 1 here, so that 0 marks an empty slot.
        index = held % (1 << _INDEX_BITS) - 1
        if held >> _INDEX_BITS == mark and 0 <= index < self._rank.processes:
            return None if index == self._rank.index else int(index)
        _SLOT.pack_into(self._slots, offset, mark << _INDEX_BITS | self._rank.index + 1)
        return None

    def close(self) -> None:
        """Unmap and close the file."""
        if self._slots is not None:
            self._slots.close()
