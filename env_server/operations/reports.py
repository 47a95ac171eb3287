"""What a server reports to those who run it: its metrics as Prometheus' text, and whether it is ready.

Each I/O process has its own; a call to one of them gets those of all together.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.io_process import Lifecycle, Reason, ReasonCode, ServerPhase
from rollgym.env_server.gateway.peers import Peers
from rollgym.env_server.gateway.registry import Roster
from rollgym.env_server.operations.server_metrics import SERVER_METRICS, Combine, ServerState
from rollgym.env_server.sessions.replies import Reply

# Calls more frequent than this return the last result.
_FRESH_S = 1.0
_MOST_NAMED = 3
# Metrics of the process itself that are not summed over the processes.
_OF_PROCESSES: dict[str, Combine] = {
    "process_max_fds": "largest",
    "process_start_time_seconds": "smallest",
}
_COMBINED = {metric.name: metric.combine for metric in SERVER_METRICS} | _OF_PROCESSES


class Reports:
    """What is reported of this process, and of all together.

    Args:
        state: The parts of this process, whose figures are read.
        lifecycle: Whether it is starting or draining.
        roster: The registrations of other servers from before a restart.
        peers: The other processes.
    """

    def __init__(self, state: ServerState, lifecycle: Lifecycle, roster: Roster, peers: Peers) -> None:
        self._index = state.rank.index
        self._readiness = Readiness(state, lifecycle, roster)
        self._exposition = Exposition(state)
        self._peers = peers

    async def readiness(self) -> list[Reason]:
        """Why the server cannot take new sessions; empty if it can."""
        own, others = await asyncio.gather(self._readiness.reasons(), self._peers.readiness())
        return own + others

    async def metrics(self, caller: Caller) -> bytes:
        """The metrics of all processes."""
        replies = await self._peers.gather(Context(caller, binary=False), "metrics", {})
        # A process that does not answer adds no figures, but the server is not ready without it.
        own = self._exposition.text(ready=not await self.readiness())
        if not replies:
            return own.encode()
        return merged_exposition([own, *(reply["text"] for reply in replies)])

    async def of_this_process(self, op: str) -> Reply:
        """What another process asks of this one: its `metrics`, or whether it is `ready`."""
        reasons = await self._readiness.reasons()
        if op == "metrics":
            return {"text": self._exposition.text(ready=not reasons)}
        return {"process": self._index, "reasons": reasons}


class Readiness:
    """The reasons that keep one I/O process from taking new sessions.

    Args:
        state: The parts of the process.
        lifecycle: Whether it is starting or draining.
        roster: The registrations of other servers from before a restart.
    """

    def __init__(self, state: ServerState, lifecycle: Lifecycle, roster: Roster) -> None:
        self._rank = state.rank
        self._worker_pools = state.pools
        self._journal_file = state.journal_file
        self._shared_journal = state.shared_journal
        self._lifecycle = lifecycle
        self._roster = roster
        self._disk_trouble: str | None = None
        self._disk_asked_at = 0.0

    async def reasons(self) -> list[Reason]:
        """The reasons why this process is not ready; empty if it is ready."""
        found: list[tuple[ReasonCode, str]] = []
        phase = self._lifecycle.phase
        if phase is ServerPhase.STARTING:
            found.append(("starting", "the server is looking at its environments"))
        elif phase is ServerPhase.DRAINING:
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


class Exposition(Collector):
    """Turns plain counters, and what the parts of a server report, into metrics at each scrape.

    Args:
        state: The source of the figures.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(self)
        ProcessCollector(registry=self._prometheus)

    def text(self, *, ready: bool) -> str:
        """All metrics in Prometheus' text format.

        Args:
            ready: Whether this process is ready.
        """
        self._state.ready = ready
        return generate_latest(self._prometheus).decode()

    def collect(self) -> Iterator[Metric]:
        """Give each metric with its present values."""
        return (metric.measured(self._state) for metric in SERVER_METRICS)


def merged_exposition(texts: Iterable[str]) -> bytes:
    """Make one text of those of several processes, sample by sample."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Combined(texts))
    return generate_latest(registry)


class _Combined(Collector):
    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = list(texts)

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text):
                found.setdefault(family.name, family)
                values = samples.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sample.labels.items()))
                    values[key] = _combined(family.name, values.get(key), sample.value)
        for name, family in found.items():
            total = Metric(name, family.documentation, family.type)
            for (sample_name, labels), value in samples[name].items():
                total.add_sample(sample_name, dict(labels), value)
            yield total


def _combined(name: str, so_far: float | None, value: float) -> float:
    if so_far is None:
        return value
    match _COMBINED.get(name, "sum"):
        case "largest":
            return max(so_far, value)
        case "smallest":
            return min(so_far, value)
        case _:
            return so_far + value
