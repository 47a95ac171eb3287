"""Sessions that outlived the process that owned them: taken from its journals, rebuilt when they are next used."""

import asyncio
import logging
from collections.abc import Callable

from env_server.auth import Caller, Tokens
from env_server.catalog import Catalog, CatalogEntry
from env_server.journal_file import JournaledSession, JournalFile
from env_server.session import EndReason, Session
from env_server.sessions import Sessions
from env_server.workers.base import Worker

_log = logging.getLogger(__name__)


def revive(
    journal_file: JournalFile,
    catalog: Catalog,
    tokens: Tokens,
    sessions: Sessions,
    workers: Callable[[CatalogEntry], Worker],
) -> None:
    """Take in the sessions of a journal file; those that cannot go on are remembered as gone."""
    for session_id, owner, reason in journal_file.ended:
        sessions.bury(session_id, owner, reason)
    known = journal_file.sessions
    for journaled in known:
        entry = catalog.find(journaled.journal.env_id)
        caller = tokens.named(journaled.owner)
        loss = _loss(journaled, entry)
        if entry is None or caller is None or loss is not None:
            sessions.bury(journaled.session_id, journaled.owner, loss or "lost")
            journal_file.closed(journaled.session_id, loss or "lost")
            continue
        session = _session(journaled, entry, caller, workers(entry))
        sessions.readmit(session, caller)
        if session.lingers:
            # The sockets that used it died with the process.
            sessions.orphan(session)
    if known:
        _log.warning("%d of %d sessions go on from their journals", len(sessions.by_id), len(known))


def _loss(journaled: JournaledSession, entry: CatalogEntry | None) -> EndReason | None:
    """Why a session cannot go on, if it cannot. One that was never reset has nothing to lose."""
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
        row=caller.row,
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
