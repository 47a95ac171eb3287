"""The journals of one I/O process on disk, so that its sessions outlive it."""

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from rollgym.env_server.journal.journal import EndedStep, EndReason, Journal

_MAGIC = b"RGJRNL03"
_HEAD = struct.Struct("<II")
_GROWTH = 1024 * 1024
# Compaction is worth it only where it frees more than it copies, and more than this.
_SLACK = 1024 * 1024

_OPENED, _BEGAN, _RETURNED, _STEPPED, _CLOSED = range(5)

_log = logging.getLogger(__name__)


class JournalError(Exception):
    """The file cannot be used; the message is for the operator."""


class Opening(NamedTuple):
    """The request that a session was opened by, which may come again.

    Attributes:
        op: The operation.
        request_id: Its id.
        sessions: How many it opened.
        episode: The episode that they began with; -1 without a reset.
        step: The step of that.
    """

    op: str
    request_id: str
    sessions: int
    episode: int
    step: int


@dataclass(slots=True)
class JournaledSession:
    """A session as the file knows it.

    Attributes:
        session_id: Its id.
        owner: The name of the token that made it.
        idle_timeout_s: When it is evicted.
        lingers: Whether it was made on a socket.
        opened_by: The request that opened it, where that had an id.
        journal: Its present episode.
        episode: The index of that; -1 before the first reset.
        number: What records call it.
        opening: Bytes of the record that opened it.
        playing: Bytes of the records of its present episode.
    """

    session_id: str
    owner: str
    idle_timeout_s: float
    lingers: bool
    opened_by: Opening | None
    journal: Journal
    episode: int = -1
    number: int = 0
    opening: int = 0
    playing: int = 0


class JournalFile:
    """An append-only file of what happened to sessions.

    Records are copied into a mapping of the file: that costs no system call, and the kernel keeps what was copied when
    the process is killed. A record is a length, a checksum and MessagePack; reading stops at the first record that is
    not whole, which is the one that was being copied then. Space is reserved before it is mapped, so that a full disk
    is an error here and not a signal. When most of the file is of sessions and episodes that are over, what is left is
    written to a new file, which takes the place of the old one.

    Args:
        path: The file; another one beside it (`.lock`) keeps two processes from using it at once.

    Attributes:
        ended: Id, owner and reason of the sessions that have ended since the file was last made smaller.

    Raises:
        JournalError: It is in use, cannot be read or written, or is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sessions: dict[str, JournaledSession] = {}
        self.ended: list[tuple[str, str, EndReason]] = []
        self._pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True).pack
        self._next_number = 0
        self._used = 0
        self._replaced = 0
        self._dead = 0
        self._view: mmap.mmap | None = None
        try:
            self._lock = _lock(path.with_suffix(".lock"))
        except OSError as error:
            raise JournalError(f"cannot use the journal {path}: {error}") from error
        try:
            if path.exists():
                self._read(path.read_bytes())
            self._compact()
        except (OSError, JournalError) as error:
            os.close(self._lock)
            if isinstance(error, JournalError):
                raise
            raise JournalError(f"cannot use the journal {path}: {error}") from error

    @property
    def sessions(self) -> list[JournaledSession]:
        """The sessions that are not closed."""
        return list(self._sessions.values())

    @property
    def size(self) -> int:
        """Bytes of the records in the file."""
        return self._used

    @property
    def written(self) -> int:
        """Bytes of records written so far, those to earlier files included."""
        return self._replaced + self._used

    @property
    def is_kept(self) -> bool:
        """Whether what happens is still written down; not so once the file could not grow."""
        return self._view is not None

    # -- what happens --------------------------------------------------------------------------------------------

    def opened(
        self,
        session_id: str,
        *,
        owner: str,
        idle_timeout_s: float,
        lingers: bool,
        opened_by: Opening | None,
        journal: Journal,
        episode: int,
    ) -> None:
        """Write down a new session, with the episode that it is in."""
        number, self._next_number = self._next_number, self._next_number + 1
        session = JournaledSession(
            session_id, owner, idle_timeout_s, lingers, opened_by, journal, episode, number
        )
        self._sessions[session_id] = session
        session.opening = self._append(self._opening(session, number))
        if episode >= 0:
            session.playing = self._append(self._beginning(session, number))

    def began(self, session_id: str, episode: int) -> None:
        """Write down that a session is in a new episode, with all of its steps so far.

        A session that is being made is not known here yet; `opened` writes its episode, too.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.episode = episode
        self._dead += session.playing
        session.playing = self._append(self._beginning(session, session.number))
        self._tidy()

    def stepped(self, session_id: str) -> None:
        """Write down the last step of a session."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        journal = session.journal
        outcome = journal.pending_outcome
        record: tuple[Any, ...]
        if outcome is None:
            record = (_STEPPED, session.number, journal.actions[-1], journal.last_digest(), journal.ended)
        else:
            # Making the digest costs more than writing down what it is made of.
            record = (_RETURNED, session.number, journal.actions[-1], *outcome)
        session.playing += self._append(self._pack(record))

    def closed(self, session_id: str, reason: EndReason) -> None:
        """Write down that a session is no more, and why."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._dead += session.opening + session.playing
            self._dead += self._append(self._pack((_CLOSED, session.number, reason)))
            self._tidy()

    def close(self) -> None:
        """Let go of the file; the sessions in it stay there."""
        if self._view is not None:
            self._view.close()
            self._view = None
            os.truncate(self._path, self._used)
        os.close(self._lock)

    # -- records -------------------------------------------------------------------------------------------------

    def _opening(self, session: JournaledSession, number: int) -> bytes:
        journal = session.journal
        return self._pack(
            (
                *(_OPENED, number, session.session_id, session.owner),
                *(session.idle_timeout_s, session.lingers, session.opened_by),
                *(journal.env_id, journal.env_version, journal.kwargs),
            )
        )

    def _beginning(self, session: JournaledSession, number: int) -> bytes:
        journal = session.journal
        return self._pack(
            (
                *(_BEGAN, number, session.episode, journal.seed, journal.options),
                *(journal.reset_digest, journal.actions, journal.packed_digests()),
                *(journal.reseeds, journal.ended, journal.request_id),
                None if journal.actions else journal.before,
            )
        )

    def _append(self, record: bytes) -> int:
        """Add a record; gives the bytes that it takes."""
        start = self._used + _HEAD.size
        end = start + len(record)
        view = self._view
        if view is None or end > len(view):
            view = self._grow(end)
            if view is None:
                return 0
        view[start:end] = record
        _HEAD.pack_into(view, self._used, len(record), zlib.crc32(record))
        self._used = end
        return end - start + _HEAD.size

    def _grow(self, needed: int) -> mmap.mmap | None:
        if self._view is None:
            return None
        self._view.close()
        try:
            self._view = _map(self._path, needed + _GROWTH)
        except OSError as error:
            # What is in the file grows old from here on, and must not be taken for the truth later.
            self._view = None
            _log.error("no journals from here on: cannot write to %s: %s", self._path, error)
            try:
                self._path.unlink(missing_ok=True)
            except OSError as left:
                _log.error("remove %s before the next start: it is out of date: %s", self._path, left)
        return self._view

    # -- compaction ----------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        if self._dead > _SLACK and 2 * self._dead > self._used and self._view is not None:
            try:
                self._compact()
            except OSError as error:
                # The file is as good as before. The next try is when as much again is over.
                self._dead = 0
                with contextlib.suppress(OSError):
                    self._path.with_suffix(".new").unlink()
                _log.error("the journal %s cannot be made smaller: %s", self._path, error)

    def _compact(self) -> None:
        """Write what is not over to a new file, in the place of the old one."""
        openings, beginnings = [], []
        for number, session in enumerate(self._sessions.values()):
            openings.append(_record(self._opening(session, number)))
            beginnings.append(b"" if session.episode < 0 else _record(self._beginning(session, number)))
        content = b"".join((_MAGIC, *itertools.chain(*zip(openings, beginnings, strict=True))))
        fresh = self._path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(content)
        view = _map(fresh, len(content) + _GROWTH)
        fresh.replace(self._path)
        if self._view is not None:
            self._view.close()
        self._view = view
        self._replaced += self._used
        self._used = len(content)
        self._dead = 0
        self._next_number = len(openings)
        for number, session in enumerate(self._sessions.values()):
            session.number = number
            session.opening, session.playing = len(openings[number]), len(beginnings[number])

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, content: bytes) -> None:
        """Take in the sessions of a file, as far as it is whole."""
        if content and content[: len(_MAGIC)] != _MAGIC:
            raise JournalError(f"{self._path} is not a journal that this version can read")
        by_number: dict[int, JournaledSession] = {}
        for kind, number, *fields in _records(content):
            if kind == _OPENED:
                by_number[number] = _opened(number, *fields)
            elif kind == _CLOSED:
                session = by_number.pop(number)
                self.ended.append((session.session_id, session.owner, *fields))
            else:
                _apply(by_number[number], kind, *fields)
        self._sessions = {session.session_id: session for session in by_number.values()}


def _opened(number: int, *fields: Any) -> JournaledSession:
    session_id, owner, idle_timeout_s, lingers, opened_by, env_id, env_version, kwargs = fields
    journal = Journal(env_id, env_version, kwargs)
    opening = None if opened_by is None else Opening(*opened_by)
    return JournaledSession(session_id, owner, idle_timeout_s, lingers, opening, journal, number=number)


def _apply(session: JournaledSession, kind: int, *fields: Any) -> None:
    """Do again to a session what a record says."""
    if kind == _BEGAN:
        episode, seed, options, reset_digest, actions, digests, reseeds, ended, request_id, before = fields
        session.episode = episode
        session.journal.resume(
            seed, options, reset_digest, actions, digests, [(steps, seed) for steps, seed in reseeds]
        )
        session.journal.ended = (ended[0], ended[1])
        session.journal.request_id = request_id
        session.journal.before = None if before is None else EndedStep(*before)
    elif kind == _RETURNED:
        session.journal.record(*fields)
    else:
        action, digest, ended = fields
        session.journal.recall(action, digest, (ended[0], ended[1]))


def _record(content: bytes) -> bytes:
    return _HEAD.pack(len(content), zlib.crc32(content)) + content


def _records(content: bytes) -> Iterator[list[Any]]:
    """The records of a file up to the first that is not whole."""
    start = len(_MAGIC)
    while start + _HEAD.size <= len(content):
        length, checksum = _HEAD.unpack_from(content, start)
        start += _HEAD.size
        record = content[start : start + length]
        if length == 0 or len(record) < length or zlib.crc32(record) != checksum:
            return
        yield msgpack.unpackb(record, strict_map_key=False)
        start += length


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise JournalError(f"another server uses {path.parent}") from None
    return descriptor


def _map(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
