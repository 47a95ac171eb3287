"""The journals of one I/O process on disk, so that its sessions outlive it.

`journal_records.py` has what the records say, and `journal_framing.py` how they stand in the file.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack

from rollgym.env_server.sessions.journal import EndReason, Journal
from rollgym.env_server.sessions.journal_framing import (
    HEAD_BYTES,
    MAGIC,
    RECORD_BYTES,
    file_head,
    framed,
    new_mark,
    read_records,
    seed_of,
    write_record,
)
from rollgym.env_server.sessions.journal_records import (
    JournaledSession,
    Opening,
    RecordReader,
    beginning_record,
    closing_record,
    opening_record,
    step_record,
)

_GROWTH = 1024 * 1024
# Compaction pays off only if it frees more than it copies, and more than this.
_SLACK = 1024 * 1024
# Rewriting all sessions takes the event loop's time, and a disk that was full a moment ago is likely still full.
_RETRY_S = 10.0
_log = logging.getLogger(__name__)


class JournalError(Exception):
    """The file cannot be used; the message is for the operator."""


class JournalFile:
    """An append-only file of the events of sessions.

    Records are copied into a mapping of the file: that costs no system call, and the kernel keeps the copied bytes when
    the process is killed. A power failure may lose any part of it: a session that may lack records is lost, and never
    resumes from an earlier point. Space is reserved before it is mapped, so that a full disk is an error here and not a
    signal. When most of the file belongs to sessions and episodes that are over, the rest is written to a new file,
    which replaces the old one. A file that cannot grow is renamed (`.stale`), and all sessions are written to a new
    file once there is room; a process that finds only the stale file knows which sessions are lost.

    Args:
        path: The file; another one beside it (`.lock`) keeps two processes from using it at once.

    Attributes:
        ended: Id, owner and reason of the sessions that have ended since the file was last made smaller, and of those
            that missing records have lost.
        damage: The number of places where records were missing.

    Raises:
        JournalError: It is in use, cannot be read or written, or is not a journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sessions: dict[str, JournaledSession] = {}
        self.ended: list[tuple[str, str, EndReason]] = []
        self._pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True).pack
        self.damage = 0
        self._mark = b""
        self._seed = 0
        self._records = 0
        self._next_number = 0
        self._used = 0
        self._retry_at = 0.0
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
            elif self._stale.exists():
                self._read(self._stale.read_bytes(), is_stale=True)
            self._compact()
            self._stale.unlink(missing_ok=True)
        except (OSError, JournalError) as error:
            os.close(self._lock)
            if isinstance(error, JournalError):
                raise
            raise JournalError(f"cannot use the journal {path}: {error}") from error

    @property
    def _stale(self) -> Path:
        """The contents of a file that could not grow."""
        return self._path.with_suffix(".stale")

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
        """Whether events are written; False while the file cannot grow."""
        return self._view is not None

    def resume(self) -> None:
        """Rewrite all sessions, if the file could not grow and there may be room again."""
        if self._view is not None or time.monotonic() < self._retry_at:
            return
        self._retry_at = time.monotonic() + _RETRY_S
        try:
            self._compact()
            self._stale.unlink(missing_ok=True)
        except OSError:
            self._discard_new()
        else:
            _log.warning("journals are kept again, in %s", self._path)

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
        if self._view is None:
            self.resume()
            return
        session.opening = self._append(self._pack(opening_record(session, number)))
        if episode >= 0:
            session.playing = self._append(self._pack(beginning_record(session, number)))

    def began(self, session_id: str, episode: int) -> None:
        """Write down that a session is in a new episode, with all of its steps so far.

        A session that is being made is not known here yet; `opened` writes its episode, too.
        """
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.episode = episode
        if self._view is None:
            self.resume()
            return
        self._dead += session.playing
        session.playing = self._append(self._pack(beginning_record(session, session.number)))
        self._tidy()

    def stepped(self, session_id: str) -> None:
        """Write down the last step of a session."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if self._view is None:
            self.resume()
            return
        session.playing += self._append(self._pack(step_record(session)))

    def closed(self, session_id: str, reason: EndReason) -> None:
        """Record that a session has ended, and why."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        if self._view is None:
            self.resume()
            return
        self._dead += session.opening + session.playing
        self._dead += self._append(self._pack(closing_record(session, reason)))
        self._tidy()

    def close(self) -> None:
        """Unmap and close the file; its sessions stay in it."""
        self._retry_at = 0.0
        self.resume()
        if self._view is not None:
            self._view.close()
            self._view = None
            try:
                os.truncate(self._path, self._used)
            except OSError as error:
                # What is behind its records is room that was reserved, which a reader passes over.
                _log.error("the journal %s cannot be cut to its records: %s", self._path, error)
        os.close(self._lock)

    # -- records -------------------------------------------------------------------------------------------------

    def _append(self, record: bytes) -> int:
        """Append a record; return its size in bytes."""
        size = RECORD_BYTES + len(record)
        view = self._view
        if view is None or self._used + size > len(view):
            view = self._grow(self._used + size)
            if view is None:
                return 0
        self._used = write_record(view, self._used, self._mark, self._seed, self._records, record)
        self._records += 1
        return size

    def _grow(self, needed: int) -> mmap.mmap | None:
        if self._view is None:
            return None
        self._view.close()
        try:
            self._view = _map(self._path, needed + _GROWTH)
        except OSError as error:
            self._view = None
            self._give_up(error)
        return self._view

    def _give_up(self, error: OSError) -> None:
        """Stop writing until there is room: the file's contents must not be trusted later."""
        _log.error("no journals from here on, until there is room: cannot write to %s: %s", self._path, error)
        self._retry_at = time.monotonic() + _RETRY_S
        try:
            self._path.replace(self._stale)
        except FileNotFoundError:
            return
        except OSError as left:
            _log.error("remove %s before the next start: it is out of date: %s", self._path, left)

    # -- compaction ----------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        if self._dead > _SLACK and 2 * self._dead > self._used and self._view is not None:
            try:
                self._compact()
            except OSError as error:
                # The file is as good as before. The next try is when as much again is over.
                self._dead = 0
                self._discard_new()
                _log.error("the journal %s cannot be made smaller: %s", self._path, error)

    def _discard_new(self) -> None:
        """Give back the room of a new file that could not be written."""
        with contextlib.suppress(OSError):
            self._path.with_suffix(".new").unlink()

    def _compact(self) -> None:
        """Write open sessions and episodes to a new file, which replaces the old one."""
        mark = new_mark()
        records: list[bytes] = []
        sizes = []
        for number, session in enumerate(self._sessions.values()):
            opening = framed(mark, len(records), self._pack(opening_record(session, number)))
            records.append(opening)
            beginning = b""
            if session.episode >= 0:
                beginning = framed(mark, len(records), self._pack(beginning_record(session, number)))
                records.append(beginning)
            sizes.append((len(opening), len(beginning)))
        used = HEAD_BYTES + sum(map(len, records))
        content = b"".join((file_head(mark, used), *records))
        fresh = self._path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_bytes(content)
        view = _map(fresh, len(content) + _GROWTH)
        fresh.replace(self._path)
        if self._view is not None:
            self._view.close()
        self._view = view
        self._replaced += self._used
        self._mark, self._seed = mark, seed_of(mark)
        self._records = len(records)
        self._used = len(content)
        self._dead = 0
        self._next_number = len(sizes)
        for number, session in enumerate(self._sessions.values()):
            session.number = number
            session.opening, session.playing = sizes[number]

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, content: bytes, *, is_stale: bool = False) -> None:
        """Take in the sessions of a file; of a stale one, which have ended."""
        if content and content[: len(MAGIC)] != MAGIC:
            raise JournalError(f"{self._path} is not a journal that this version can read")
        reader = RecordReader()
        for record in read_records(content) if content else ():
            reader.take(record)
        if is_stale:
            reader.note_gap()
        self.damage = reader.gaps
        self.ended = reader.ended
        for session in reader.known.values():
            if session.number in reader.sound:
                self._sessions[session.session_id] = session
            else:
                self.ended.append((session.session_id, session.owner, "lost"))
        if reader.gaps:
            lost = len(reader.known) - len(self._sessions)
            _log.error(
                "%s lacks something at %d places%s: %d sessions are lost, and so are those that it does not name",
                *(self._path, reader.gaps, " (the disk was full)" if is_stale else "", lost),
            )


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
