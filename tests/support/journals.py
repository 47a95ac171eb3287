"""A writer of journals that knows what each of its records has to leave behind."""

import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rollgym.env_server.sessions.journal import Journal
from rollgym.env_server.sessions.journal_file import JournalFile
from rollgym.env_server.sessions.journal_records import JournaledSession, Opening

FILE_HEAD = 28
"""Bytes before the first record."""
HEAD = struct.Struct("<4sIII")
"""What a record begins with: the file's mark, its length, its number and its checksum."""
# What the fields of records are drawn from.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.just("long " * 200)
NUMBER = st.integers(-(2**53) + 1, 2**53 - 1)
FLOAT = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | NUMBER | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
STEP = st.tuples(PLAIN, PLAIN, FLOAT, st.booleans(), st.booleans())
SEED = st.integers(0, 2**53 - 1)
OPTIONS = st.none() | st.dictionaries(TEXT, PLAIN, max_size=2)
COMMON = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def look(session: JournaledSession) -> dict[str, Any]:
    """All that a file has to keep of a session."""
    journal = session.journal
    fields = ("env_id", "env_version", "kwargs", "seed", "options", "reset_digest", "actions", "digests")
    return {
        "session": (
            session.session_id,
            session.owner,
            session.idle_timeout_s,
            session.lingers,
            session.opened_by,
            session.episode,
        ),
        "ended": tuple(journal.ended),
        "reseeds": list(journal.reseeds),
        "request_id": journal.request_id,
        "before": None if journal.actions else journal.before,
        **{name: copy(getattr(journal, name)) for name in fields},
    }


def look_at(file: JournalFile) -> dict[str, dict[str, Any]]:
    return {session.session_id: look(session) for session in file.sessions}


@contextmanager
def opened(path: Path) -> Iterator[JournalFile]:
    file = JournalFile(path)
    try:
        yield file
    finally:
        file.close()


def killed_before(content: bytes, end: int) -> bytes:
    """What a process leaves that is killed before the head says that records are whole up to there."""
    return content[:12] + struct.pack("<QQ", end, end ^ (2**64 - 1)) + content[FILE_HEAD:]


def refound(content: bytes) -> tuple[dict[str, dict[str, Any]], dict[str, str], int]:
    """The sessions that a process finds in these bytes, why others have ended, and how often something is missing."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.bin"
        path.write_bytes(content)
        with opened(path) as file:
            return look_at(file), {each: reason for each, _, reason in file.ended}, file.damage


def read(content: bytes) -> dict[str, dict[str, Any]]:
    """What a process finds whose predecessor was killed and has left these bytes."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.bin"
        path.write_bytes(content)
        with opened(path) as file:
            found = look_at(file)
        # It was written anew; a second look finds the same.
        with opened(path) as file:
            assert look_at(file) == found
        return found


def offsets(content: bytes) -> list[int]:
    """Where the records of a file end."""
    ends = [FILE_HEAD]
    mark = int.from_bytes(content[8:12], "little")
    while ends[-1] + HEAD.size <= len(content):
        _, length, number, checksum = HEAD.unpack_from(content, ends[-1])
        start = ends[-1] + HEAD.size
        if not length or zlib.crc32(content[start : start + length], number ^ mark) != checksum:
            break
        ends.append(start + length)
    return ends


class Writer:
    """Does to a file what a server does, and notes what the file has to say after each record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = JournalFile(path)
        self.journals: dict[str, Journal] = {}
        self.episodes: dict[str, int] = {}
        self.history: list[dict[str, Any]] = [{}]
        self._made = 0

    def note(self) -> None:
        self.history.append(look_at(self.file))

    def open(self, kwargs: Any = None, steps: Any = ()) -> str:
        self._made += 1
        session_id = f"0.{self._made}"
        journal = self.journals[session_id] = Journal("Env", str(self._made), kwargs or {})
        episode = -1
        if steps:
            episode = self._made
            journal.begin(5, None, "begin")
            for step in steps:
                journal.record(*step)
            journal.reseed(7)
        self.episodes[session_id] = episode
        given: dict[str, Any] = {
            "owner": f"owner {self._made}",
            "idle_timeout_s": 1.5 * self._made,
            "lingers": bool(self._made % 2),
            "opened_by": Opening("make", session_id, 1, episode, len(steps)) if self._made % 3 else None,
        }
        if steps:
            # There are two records, and the first one alone is a session that was not reset.
            fresh = JournaledSession(
                session_id, **given, journal=Journal("Env", journal.env_version, journal.kwargs)
            )
            self.history.append({**self.history[-1], session_id: look(fresh)})
        self.file.opened(session_id, **given, journal=journal, episode=episode)
        self.note()
        return session_id

    def begin(
        self, session_id: str, seed: int = 1, options: Any = None, observation: Any = "", **more: Any
    ) -> None:
        self.journals[session_id].begin(seed, options, observation, **more)
        self.episodes[session_id] += 1
        self.file.began(session_id, self.episodes[session_id])
        self.note()

    def step(self, session_id: str, step: Any = ("go", "there", 1.0, False, False)) -> None:
        self.journals[session_id].record(*step)
        self.file.stepped(session_id)
        self.note()

    def close(self, session_id: str) -> None:
        del self.journals[session_id]
        self.file.closed(session_id, "closed")
        self.note()

    def happen(self, kind: str, which: int, *fields: Any) -> None:
        """Let something happen that fits."""
        if kind == "opened":
            self.open(*fields)
            return
        if not self.journals:
            return
        session_id = list(self.journals)[which % len(self.journals)]
        if kind == "closed":
            self.close(session_id)
        elif kind == "began":
            seed, options, observation, before, request_id = fields
            self.begin(session_id, seed, options, observation, before=before, request_id=request_id)
        elif self.episodes[session_id] >= 0:
            self.step(session_id, *fields)

    @property
    def content(self) -> bytes:
        """The file as a process that is killed now leaves it."""
        return self.path.read_bytes()


@contextmanager
def writing() -> Iterator[Writer]:
    with tempfile.TemporaryDirectory() as directory:
        writer = Writer(Path(directory) / "journal-0.bin")
        try:
            yield writer
        finally:
            writer.file.close()
