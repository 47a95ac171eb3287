"""The sessions of one I/O process; one heap and one timer evict those that are idle.

Those that outlived the process that owned them are taken from its journals, and rebuilt when they are next used.
"""

import asyncio
import heapq
import itertools
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.quotas import QuotaCounters
from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.catalog.catalog import Catalog, CatalogEntry
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.metrics import Metrics
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.sessions.journal import EndReason
from rollgym.env_server.sessions.journal_file import JournalFile
from rollgym.env_server.sessions.journal_records import JournaledSession
from rollgym.env_server.sessions.session import BaseSession, LocalSession
from rollgym.env_server.workers.base import Worker

_RUNNING_WAIT_S = 1.0
_COMPACT_ABOVE = 64
_ID_BYTES = 16
_TOMBSTONES = 16384
_FULL_RETRY_S = 5
_MAX_SHOWN = 128
_log = logging.getLogger(__name__)


class Expiry:
    """Watches deadlines of sessions.

    A session has one valid entry in the heap. Using a session does not touch the heap: an entry that comes up early
    is put back at its new time, so the cost is one heap operation for each idle time-out and not for each step.

    Args:
        linger_s: How long an orphaned session stays.
        expire: Called with each session whose time is over and which runs nothing.
    """

    def __init__(self, linger_s: float, expire: Callable[[BaseSession], None]) -> None:
        self._linger_s = linger_s
        self._expire = expire
        self._heap: list[tuple[float, int, BaseSession]] = []
        self._order = itertools.count()
        self._valid: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def watch(self, session: BaseSession) -> None:
        """Watch a new session, or one whose deadline came nearer."""
        self._push(self._deadline(session), session)
        self._compact()
        self._arm()

    def forget(self, session: BaseSession) -> None:
        """Remove a session that has ended."""
        self._valid.pop(session.session_id, None)
        self._compact()

    def stop(self) -> None:
        """Stop the timer and forget all deadlines."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()
        self._valid.clear()

    def _push(self, deadline: float, session: BaseSession) -> None:
        order = next(self._order)
        self._valid[session.session_id] = order
        heapq.heappush(self._heap, (deadline, order, session))

    def _compact(self) -> None:
        """Throw dead entries away when they are most of the heap, so that ended sessions can be freed."""
        if len(self._heap) > _COMPACT_ABOVE and len(self._heap) > 2 * len(self._valid):
            self._heap = [entry for entry in self._heap if self._valid.get(entry[2].session_id) == entry[1]]
            heapq.heapify(self._heap)

    def _deadline(self, session: BaseSession) -> float:
        deadline = session.last_used + session.idle_timeout_s
        if session.orphaned_at is not None:
            # A call over HTTP uses an orphan as a socket would, and so renews its time.
            deadline = min(deadline, max(session.orphaned_at, session.last_used) + self._linger_s)
        return deadline

    def _arm(self) -> None:
        if not self._heap:
            return
        first = self._heap[0][0]
        if self._timer is not None:
            if self._timer_at <= first:
                return
            self._timer.cancel()
        # A deadline that has passed makes uvloop's timer a plain handle, which does not know when it is due.
        self._timer_at = first
        self._timer = asyncio.get_running_loop().call_at(first, self._wake)

    def _wake(self) -> None:
        self._timer = None
        # The loop may call a timer a clock tick early; the entry that it was set for is due all the same.
        now = asyncio.get_running_loop().time() + 1e-3
        while self._heap and self._heap[0][0] <= now:
            _, order, session = heapq.heappop(self._heap)
            if self._valid.get(session.session_id) != order:
                continue
            deadline = self._deadline(session)
            if deadline > now:
                self._push(deadline, session)
            elif session.is_busy:
                # The operation ends by itself or by its time-out, and counts as use.
                self._push(now + _RUNNING_WAIT_S, session)
            else:
                del self._valid[session.session_id]
                self._expire(session)
        self._arm()


class Sessions:
    """Opens, finds and ends sessions, and keeps the quotas.

    Args:
        settings: Limits and time-outs.
        rank: Which I/O process this is.
        quota_counters: The shared counts behind the quotas.
        metrics: Counts ended sessions.
        journal_file: The journal of sessions, if there is one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        rank: ProcessRank,
        quota_counters: QuotaCounters,
        metrics: Metrics,
        journal_file: JournalFile | None,
    ) -> None:
        self.by_id: dict[str, BaseSession] = {}
        self._settings = settings
        self._rank = rank
        self._quota_counters = quota_counters
        self._metrics = metrics
        self._journal_file = journal_file
        self._tombstones: OrderedDict[str, tuple[str, EndReason]] = OrderedDict()
        self._expiry = Expiry(settings.linger_s, self._evict)
        self._closing: set[asyncio.Task[None]] = set()
        self._expected: set[str] = set()

    def new_id(self) -> str:
        """An unguessable id that names the process that owns the session."""
        return f"{self._rank.index}.{secrets.token_hex(_ID_BYTES)}"

    def owner_of(self, session_id: str) -> int:
        """The I/O process that owns a session, from its id.

        Raises:
            ProblemError: `unknown_session`, if no process of this server can own it.
        """
        index = self.index_of(session_id)
        if index is None:
            raise unknown_session(session_id)
        return index

    def index_of(self, session_id: str) -> int | None:
        """The I/O process that owns a session, or None for an id that no process of this server gave."""
        index, separator, _ = session_id.partition(".")
        if not separator or len(index) > 4 or not (index.isascii() and index.isdigit()):
            return None
        return int(index) if int(index) < self._rank.processes else None

    def reserve(self, caller: Caller, count: int) -> None:
        """Take places for new sessions, before anything is made.

        Raises:
            ProblemError: `at_capacity`.
        """
        if self._quota_counters.total() + count > self._settings.max_sessions:
            raise ProblemError(
                "at_capacity",
                f"the server has its {self._settings.max_sessions} sessions",
                retry_after=_FULL_RETRY_S,
                limit="max_sessions",
            )
        limit = caller.quota.max_sessions or self._settings.max_sessions_per_token
        if self._quota_counters.of_token(caller.name) + count > limit:
            raise ProblemError(
                "at_capacity",
                f"this token has its {limit} sessions",
                retry_after=_FULL_RETRY_S,
                limit="max_sessions_per_token",
            )
        self._quota_counters.add(caller.name, count)

    def release(self, caller: Caller, count: int) -> None:
        """Give back places that were reserved and not used."""
        self._quota_counters.add(caller.name, -count)

    def add(self, session: BaseSession) -> None:
        """Take in a session whose place was reserved."""
        self.by_id[session.session_id] = session
        _log.debug("the session is open", extra={"session_id": session.session_id})
        self._expiry.watch(session)

    def expect(self, session_id: str) -> None:
        """Note a session that was here before this process was, and will be once its environment is."""
        self._expected.add(session_id)

    def readmit(self, session: BaseSession, caller: Caller) -> None:
        """Take in a session that was here before this process was."""
        self._expected.discard(session.session_id)
        self._quota_counters.add(caller.name, 1)
        self.add(session)

    def get(self, session_id: str, caller: Caller) -> BaseSession:
        """A session of this process that the caller may use.

        Raises:
            ProblemError: `unknown_session`, `session_gone` with the reason, or `draining` if it is expected.
        """
        session = self.by_id.get(session_id)
        if session is not None:
            if self.may_use(session, caller):
                return session
            raise unknown_session(session_id)
        if session_id in self._expected:
            raise ProblemError(
                "draining", "no server has registered the session's environment again yet", retry_after=1
            )
        self.refuse_ended(session_id, caller)
        raise unknown_session(session_id)

    def refuse_ended(self, session_id: str, caller: Caller) -> None:
        """Refuse a session that was the caller's and ended.

        Raises:
            ProblemError: `session_gone` with the reason.
        """
        owner, reason = self._tombstones.get(session_id, (None, None))
        if reason is not None and (owner == caller.name or caller.is_admin):
            raise session_gone(session_id, reason)

    def require_open(self, session: BaseSession) -> None:
        """Refuse a session that has ended since it was found.

        Raises:
            ProblemError: `session_gone` with the reason.
        """
        if self.by_id.get(session.session_id) is not session:
            raise session_gone(session.session_id, self.end_reason(session.session_id) or "closed")

    @staticmethod
    def may_use(session: BaseSession, caller: Caller) -> bool:
        """Whether a session is the caller's, or the caller an admin."""
        return session.owner == caller.name or caller.is_admin

    def end_reason(self, session_id: str) -> EndReason | None:
        """Why a session of this process ended, if it did."""
        entry = self._tombstones.get(session_id)
        return None if entry is None else entry[1]

    def of(self, caller: Caller) -> Iterator[BaseSession]:
        """The caller's sessions, or all for an admin."""
        for session in self.by_id.values():
            if self.may_use(session, caller):
                yield session

    def orphan(self, session: BaseSession) -> None:
        """Start the time that a session stays after its last socket."""
        session.orphaned_at = asyncio.get_running_loop().time()
        self._expiry.watch(session)

    def leave(self, session: BaseSession, socket: str) -> None:
        """Note that a socket has left a session; after its last one the session stays for a time."""
        session.sockets.discard(socket)
        if session.lingers and not session.sockets and session.orphaned_at is None:
            self.orphan(session)

    def leave_all(self, left: Callable[[str], bool]) -> None:
        """Note that sockets have left all their sessions.

        Args:
            left: Whether that is so of a socket.
        """
        for session in list(self.by_id.values()):
            for socket in [socket for socket in session.sockets if left(socket)]:
                self.leave(session, socket)

    def end(self, session: BaseSession, reason: EndReason) -> None:
        """End a session at once; its environment is closed in the background. Running operations are given up."""
        if self.by_id.pop(session.session_id, None) is None:
            return
        self._expiry.forget(session)
        about = {"session_id": session.session_id, "env_id": session.entry.env_id}
        _log.debug("the session has ended: %s", reason, extra=about)
        self._quota_counters.add(session.owner, -1)
        self._metrics.sessions_ended[reason] += 1
        if session.is_playing:
            # One that cannot be rebuilt was not left by its player.
            self._metrics.episodes[
                session.entry.label, "abandoned" if reason in ("closed", "evicted") else "error"
            ] += 1
        self.bury(session.session_id, session.owner, reason)
        if self._journal_file is not None:
            self._journal_file.closed(session.session_id, reason)
        closing = session.let_go(reason)
        if closing is not None:
            self.close_later(closing)

    def close_later(self, *closing: Coroutine[Any, Any, None]) -> None:
        """Have environments closed in the background."""
        for each in closing:
            task = asyncio.get_running_loop().create_task(each)
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def bury(self, session_id: str, owner: str, reason: EndReason) -> None:
        """Remember how a session ended."""
        self._expected.discard(session_id)
        self._tombstones[session_id] = (owner, reason)
        if len(self._tombstones) > _TOMBSTONES:
            self._tombstones.popitem(last=False)

    def count(self) -> int:
        """The number of sessions in all processes."""
        return self._quota_counters.total()

    async def shutdown(self) -> None:
        """Stop the clock and wait for environments that are being closed. Sessions are left to their journals."""
        self._expiry.stop()
        if self._closing:
            await asyncio.wait(self._closing, timeout=self._settings.drain_grace_s)

    def _evict(self, session: BaseSession) -> None:
        self.end(session, "evicted")


def unknown_session(session_id: str) -> ProblemError:
    """The problem that a session is not there, or not the caller's."""
    return ProblemError("unknown_session", f"there is no session {session_id[:_MAX_SHOWN]!r}")


def session_gone(session_id: str, reason: EndReason) -> ProblemError:
    """The problem that a session was there and ended."""
    return ProblemError("session_gone", f"session {session_id!r} is gone: {reason}", reason=reason)


class SessionRestore:
    """Restores the sessions of a journal file.

    Sessions that cannot resume are remembered as gone. Sessions at registered servers wait until such a server
    registers again, which nodes do by themselves.

    Args:
        journal_file: The file.
        catalog: The environments.
        tokens: The owners of the sessions.
        sessions: Receives the restored sessions.
        workers: Gives the worker of an environment.
        patience_s: How long sessions wait for a registration; 0 if registrations are off.
    """

    def __init__(
        self,
        journal_file: JournalFile,
        catalog: Catalog,
        tokens: Tokens,
        sessions: Sessions,
        workers: Callable[[CatalogEntry], Worker],
        patience_s: float,
    ) -> None:
        self._journal_file = journal_file
        self._catalog = catalog
        self._tokens = tokens
        self._sessions = sessions
        self._workers = workers
        self._patience_s = patience_s
        self._waiting: dict[str, list[JournaledSession]] = {}

    def begin(self) -> None:
        """Restore the sessions that can be restored now."""
        for session_id, owner, reason in self._journal_file.ended:
            self._sessions.bury(session_id, owner, reason)
        known = self._journal_file.sessions
        for journaled in known:
            env_id = journaled.journal.env_id
            if self._patience_s and self._catalog.find(env_id) is None:
                self._waiting.setdefault(env_id, []).append(journaled)
                self._sessions.expect(journaled.session_id)
            else:
                self._take_in(journaled)
        if known:
            _log.warning("%d of %d sessions go on from their journals", len(self._sessions.by_id), len(known))
        if self._waiting:
            asyncio.get_running_loop().call_later(self._patience_s, self._give_up)

    def appeared(self, env_id: str) -> list[JournaledSession]:
        """Take in the sessions of an environment that a server has registered."""
        waited = self._waiting.pop(env_id, [])
        for journaled in waited:
            self._take_in(journaled)
        return waited

    def _give_up(self) -> None:
        for env_id in list(self._waiting):
            self.appeared(env_id)

    def _take_in(self, journaled: JournaledSession) -> None:
        entry = self._catalog.find(journaled.journal.env_id)
        caller = self._tokens.named(journaled.owner)
        loss = _loss(journaled, entry)
        if entry is None or caller is None or loss is not None:
            self._sessions.bury(journaled.session_id, journaled.owner, loss or "lost")
            self._journal_file.closed(journaled.session_id, loss or "lost")
            return
        session = _session(journaled, entry, caller, self._workers(entry))
        self._sessions.readmit(session, caller)
        if session.lingers:
            # The sockets that used it died with the process.
            self._sessions.orphan(session)


def _loss(journaled: JournaledSession, entry: CatalogEntry | None) -> EndReason | None:
    """Why a session cannot resume, or None if it can. One that was never reset has nothing to lose."""
    if entry is None or (journaled.episode >= 0 and not entry.deterministic):
        return "lost"
    if journaled.journal.env_version != entry.version:
        return "replay_diverged"
    return None


def _session(
    journaled: JournaledSession, entry: CatalogEntry, caller: Caller, worker: Worker
) -> LocalSession:
    journal = journaled.journal
    session = LocalSession(
        journaled.session_id,
        entry=entry,
        owner=caller.name,
        kwargs=journal.kwargs,
        worker=worker,
        journal=journal,
        idle_timeout_s=journaled.idle_timeout_s,
        now=asyncio.get_running_loop().time(),
    )
    session.lingers = journaled.lingers
    if journaled.episode >= 0:
        session.episode = journaled.episode
        session.seed = journal.seed
        session.step = journal.steps
        session.terminated, session.truncated = journal.ended
        session.playing = not any(journal.ended)
        session.recoverable = True
    return session
