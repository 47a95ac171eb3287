"""Whether a server can take new sessions, and if not, why not."""

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollgym.env_server.common.io_process import Lifecycle, Phase, ProcessRank, Reason, ReasonCode
from rollgym.env_server.gateway.roster import Roster
from rollgym.env_server.journal.journal_file import JournalFile
from rollgym.env_server.operations.worker_pools import WorkerPools

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal

# Calls more frequent than this return the last result.
_FRESH_S = 1.0
_MOST_NAMED = 3


class Readiness:
    """The reasons that keep one I/O process from taking new sessions.

    Args:
        rank: Which process it is.
        lifecycle: Whether it is starting or draining.
        pools: Its workers.
        journal_file: The journal of its sessions, if there is one.
        roster: The registrations of other servers from before a restart.
        shared_journal: The journal that gateways share for sessions at nodes, if they share one.
    """

    def __init__(
        self,
        rank: ProcessRank,
        lifecycle: Lifecycle,
        pools: WorkerPools,
        journal_file: JournalFile | None,
        roster: Roster,
        shared_journal: "SharedJournal | None" = None,
    ) -> None:
        self._shared_journal = shared_journal
        self._rank = rank
        self._lifecycle = lifecycle
        self._worker_pools = pools
        self._journal_file = journal_file
        self._roster = roster
        self._disk_trouble: str | None = None
        self._disk_asked_at = 0.0

    async def reasons(self) -> list[Reason]:
        """The reasons why this process is not ready; empty if it is ready."""
        found: list[tuple[ReasonCode, str]] = []
        phase = self._lifecycle.phase
        if phase is Phase.STARTING:
            found.append(("starting", "the server is looking at its environments"))
        elif phase is Phase.DRAINING:
            found.append(("draining", "the server ends when what runs is finished"))
        if (trouble := self._worker_pools.trouble) is not None:
            found.append(("workers", trouble))
        if self._worker_pools.threads_stuck:
            found.append(("threads", "all threads for environments are stuck in calls that took too long"))
        if self._journal_file is not None:
            self._journal_file.resume()
            if not self._journal_file.is_kept:
                found.append(
                    ("journal", "the journal cannot be written, so sessions would not outlive a crash")
                )
        missing = self._roster.missing()
        if missing:
            found.append(("registrations", _not_back(missing)))
        if self._shared_journal is not None and self._shared_journal.trouble is not None:
            found.append(("journal", "the journal that the gateways share cannot be used"))
        full = await self._look_at_disk()
        if full is not None:
            found.append(("state_dir", f"the state directory cannot be written: {full}"))
        return [Reason(code, detail, self._rank.index) for code, detail in found]

    async def _look_at_disk(self) -> str | None:
        directory = self._rank.directory
        if directory is None:
            return None
        now = time.monotonic()
        if now - self._disk_asked_at > _FRESH_S:
            self._disk_asked_at = now
            # In a thread: a network's file system may take its time.
            self._disk_trouble = await asyncio.to_thread(_write, directory / f"ready-{self._rank.index}")
        return self._disk_trouble


def _not_back(env_ids: list[str]) -> str:
    shown = ", ".join(env_ids[:_MOST_NAMED]) + (", ..." if len(env_ids) > _MOST_NAMED else "")
    return f"servers that had registered {shown} have not come back since the gateway was started anew"


def _write(path: Path) -> str | None:
    """Write a small file; return the error, if one occurred."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(descriptor, b"ready\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        return error.strerror or type(error).__name__
    return None
