"""What the records of a journal's file say: which session was opened, and what happened in it.

Each record is a kind, the session's number, and fields. `RecordReader` makes the sessions of them again.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from rollgym.env_server.sessions.journal import EndedStep, EndReason, Journal

_OPENED, _BEGAN, _RETURNED, _STEPPED, _CLOSED = range(5)
# Errors of records that have the right checksum but invalid contents.
_UNREADABLE = (TypeError, ValueError, LookupError, msgpack.exceptions.UnpackException)


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
        opened_by: The request that opened it, if that had an id.
        journal: Its present episode.
        episode: The index of that; -1 before the first reset.
        number: Its number in records.
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


def opening_record(session: JournaledSession, number: int) -> tuple[Any, ...]:
    """Return the record of a new session.

    Args:
        session: The session.
        number: Its number in the file that the record is for.
    """
    journal = session.journal
    return (
        *(_OPENED, number, session.session_id, session.owner),
        *(session.idle_timeout_s, session.lingers, session.opened_by),
        *(journal.env_id, journal.env_version, journal.kwargs),
    )


def beginning_record(session: JournaledSession, number: int) -> tuple[Any, ...]:
    """Return the record of a session's present episode, with all of its steps so far.

    Args:
        session: The session.
        number: Its number in the file that the record is for.
    """
    journal = session.journal
    return (
        *(_BEGAN, number, session.episode, journal.seed, journal.options),
        *(journal.reset_digest, journal.actions, journal.packed_digests()),
        *(journal.reseeds, journal.ended, journal.request_id),
        None if journal.actions else journal.before,
    )


def step_record(session: JournaledSession) -> tuple[Any, ...]:
    """Return the record of a session's last step."""
    journal = session.journal
    outcome = journal.pending_outcome
    place = session.number, session.episode, journal.steps - 1
    if outcome is None:
        return (_STEPPED, *place, journal.actions[-1], journal.last_digest(), journal.ended)
    # Computing the digest costs more than writing its input.
    return (_RETURNED, *place, journal.actions[-1], *outcome)


def closing_record(session: JournaledSession, reason: EndReason) -> tuple[Any, ...]:
    """Return the record of a session's end."""
    return (_CLOSED, session.number, reason)


class RecordReader:
    """Replays records, and tracks the sessions that may lack some.

    Attributes:
        known: The open sessions, by their numbers in records.
        sound: Those that lack no records.
        ended: Id, owner and reason of those that were closed.
        gaps: At how many places something was missing.
    """

    def __init__(self) -> None:
        self.known: dict[int, JournaledSession] = {}
        self.sound: set[int] = set()
        self.ended: list[tuple[str, str, EndReason]] = []
        self.gaps = 0

    def note_gap(self) -> None:
        """Note that anything may be missing here: the end of any session, too."""
        self.gaps += 1
        self.sound.clear()

    def take(self, record: bytes | None) -> None:
        """Apply a record; None is a gap."""
        if record is None:
            self.note_gap()
            return
        try:
            kind, number, *fields = msgpack.unpackb(record, strict_map_key=False)
            self._do(kind, number, fields)
        except _UNREADABLE:
            self.note_gap()

    def _do(self, kind: int, number: int, fields: list[Any]) -> None:
        if kind == _OPENED:
            self.known[number] = _opened(number, *fields)
            self.sound.add(number)
            return
        session = self.known.get(number)
        if session is None:
            # If no record is missing so far, no session is missing either.
            if not self.gaps:
                self.note_gap()
        elif kind == _CLOSED:
            del self.known[number]
            self.sound.discard(number)
            self.ended.append((session.session_id, session.owner, *fields))
        elif kind == _BEGAN:
            _begin(session, *fields)
            self.sound.add(number)
        else:
            self._step(session, kind, *fields)

    def _step(self, session: JournaledSession, kind: int, episode: int, step: int, *fields: Any) -> None:
        """Take a step, if it is the next one: then nothing of its session was missing before it."""
        if (episode, step) != (session.episode, session.journal.steps):
            if session.number in self.sound:
                self.note_gap()
            return
        if kind == _RETURNED:
            session.journal.record(*fields)
        else:
            action, digest, ended = fields
            session.journal.recall(action, digest, (ended[0], ended[1]))
        self.sound.add(session.number)


def _opened(number: int, *fields: Any) -> JournaledSession:
    session_id, owner, idle_timeout_s, lingers, opened_by, env_id, env_version, kwargs = fields
    journal = Journal(env_id, env_version, kwargs)
    opening = None if opened_by is None else Opening(*opened_by)
    return JournaledSession(session_id, owner, idle_timeout_s, lingers, opening, journal, number=number)


def _begin(session: JournaledSession, *fields: Any) -> None:
    """Put a session into the episode that a record says."""
    episode, seed, options, reset_digest, actions, digests, reseeds, ended, request_id, before = fields
    session.episode = episode
    session.journal.resume(
        seed, options, reset_digest, actions, digests, [(steps, seed) for steps, seed in reseeds]
    )
    session.journal.ended = (ended[0], ended[1])
    session.journal.request_id = request_id
    session.journal.before = None if before is None else EndedStep(*before)
