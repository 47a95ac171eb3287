"""Sessions that outlived the process that owned them: taken from its journals, rebuilt when they are next used."""

import asyncio
import logging
from collections.abc import Callable

from rollgym.env_server.access.tokens import Caller, Tokens
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.catalog.entry import CatalogEntry
from rollgym.env_server.journal.journal import EndReason
from rollgym.env_server.journal.journal_file import JournaledSession, JournalFile
from rollgym.env_server.sessions.session import Session
from rollgym.env_server.sessions.sessions import Sessions
from rollgym.env_server.workers.base import Worker

_log = logging.getLogger(__name__)


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


def _session(journaled: JournaledSession, entry: CatalogEntry, caller: Caller, worker: Worker) -> Session:
    journal = journaled.journal
    session = Session(
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
