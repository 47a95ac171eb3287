"""How records stand in a journal's file, so that any of them that is damaged, missing, doubled or out of place shows.

A file begins with a mark of its own, four random bytes, which stands before each record and is part of its checksum: so
data of clients never passes for a record, and the next whole record is found after a damaged one. Records are numbered.
The head says up to which byte they are complete; what follows is the record that was being written when the process was
killed.
"""

import mmap
import secrets
import struct
from collections.abc import Iterator
from typing import NamedTuple
from zlib import crc32

MAGIC = b"RGJRNL04"
"""The first bytes of a file."""

_HEAD = struct.Struct("<8s4sQQ")
_USED = struct.Struct("<QQ")
_USED_AT = 12
_RECORD = struct.Struct("<4sIII")
_ALL_BITS = 2**64 - 1
# Each step writes one.
_pack_record, _pack_used = _RECORD.pack_into, _USED.pack_into

HEAD_BYTES = _HEAD.size
"""Bytes before the first record."""
RECORD_BYTES = _RECORD.size
"""Bytes of a record before its content."""


class _Whole(NamedTuple):
    """A record whose checksum is right."""

    number: int
    content: bytes
    end: int


def new_mark() -> bytes:
    """The mark of a new file; unwritten space is zero, so none of its bytes are."""
    return bytes(1 + secrets.randbelow(255) for _ in range(4))


def file_head(mark: bytes, used: int) -> bytes:
    """The head of a file.

    Args:
        mark: Its mark.
        used: The offset up to which its records are complete.
    """
    return _HEAD.pack(MAGIC, mark, used, used ^ _ALL_BITS)


def framed(mark: bytes, number: int, content: bytes) -> bytes:
    """A record as it stands in the file."""
    checksum = crc32(content, number ^ seed_of(mark))
    return _RECORD.pack(mark, len(content), number, checksum) + content


def write_record(view: mmap.mmap, used: int, mark: bytes, seed: int, number: int, content: bytes) -> int:
    """Add a record to a file that has room for it; return the offset up to which its records are complete."""
    start = used + RECORD_BYTES
    end = start + len(content)
    view[start:end] = content
    _pack_record(view, used, mark, len(content), number, crc32(content, number ^ seed))
    _pack_used(view, _USED_AT, end, end ^ _ALL_BITS)
    return end


def seed_of(mark: bytes) -> int:
    """The seed of the checksums of a file's records, beside their numbers."""
    return int.from_bytes(mark, "little")


def read_records(content: bytes) -> Iterator[bytes | None]:
    """The records of a file in their order; None at each place with possibly missing records.

    Args:
        content: The file, which begins with `MAGIC`.
    """
    if len(content) < HEAD_BYTES:
        yield None
        return
    _, mark, used, complement = _HEAD.unpack_from(content)
    if used != complement ^ _ALL_BITS:
        yield None
        used = 0
    at, expected = HEAD_BYTES, 0
    while True:
        found = _record_at(content, at, mark)
        if found is None:
            found = _record_after(content, at, mark)
            if found is None:
                break
            yield None
        elif found.number != expected:
            yield None
        if found.number >= expected:
            yield found.content
            expected = found.number + 1
        at = found.end
    if at < used:
        yield None


def _record_at(content: bytes, at: int, mark: bytes) -> _Whole | None:
    start = at + _RECORD.size
    if start > len(content):
        return None
    marked, length, number, checksum = _RECORD.unpack_from(content, at)
    end = start + length
    if marked != mark or not length or end > len(content):
        return None
    record = content[start:end]
    return _Whole(number, record, end) if crc32(record, number ^ seed_of(mark)) == checksum else None


def _record_after(content: bytes, at: int, mark: bytes) -> _Whole | None:
    """The next whole record after a position that is not the start of one."""
    while (at := content.find(mark, at + 1)) >= 0:
        found = _record_at(content, at, mark)
        if found is not None:
            return found
    return None
