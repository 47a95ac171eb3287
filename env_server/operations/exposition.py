"""What I/O processes counted, as Prometheus metrics with stable names and bounded labels."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rollgym.clients.measuring.metrics import queued_seconds
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.setting_sections import Isolation
from rollgym.env_server.common.settings import Settings
from rollgym.env_server.gateway.registry import Registry
from rollgym.env_server.journal.journal_file import JournalFile
from rollgym.env_server.operations.worker_pools import WorkerPools
from rollgym.env_server.sessions.session import BaseSession
from rollgym.env_server.telemetry.durations import BOUNDS, Durations
from rollgym.env_server.telemetry.metrics import Metrics
from rollgym.version import __version__

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


_LE = (*map(str, BOUNDS), "+Inf")
_ISOLATIONS: tuple[Isolation, ...] = ("inline", "thread", "process")
# By the value of the one label, or by the values of several.
_Values = Mapping[Any, float]
# What says the same in each process, or is a point in time: a sum would mean nothing.
_LARGEST = frozenset({"rollgym_max_sessions", "rollgym_build_info", "process_max_fds"})
_SMALLEST = frozenset({"process_start_time_seconds", "rollgym_ready", "rollgym_shared_journal_up"})


class Exposition(Collector):
    """Turns plain counters, and what the parts of a server say of themselves, into metrics when somebody asks.

    Args:
        settings: What the operator set.
        rank: Which process this is.
        metrics: What was counted.
        sessions: The open sessions by their ids.
        pools: The workers.
        registry: The registrations.
        journal_file: Where sessions are written down, if anywhere.
        shared_journal: Where gateways write down sessions at nodes together, if they do.
    """

    def __init__(
        self,
        settings: Settings,
        rank: ProcessRank,
        metrics: Metrics,
        sessions: Mapping[str, BaseSession],
        pools: WorkerPools,
        registry: Registry,
        journal_file: JournalFile | None,
        shared_journal: "SharedJournal | None",
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._metrics = metrics
        self._sessions = sessions
        self._worker_pools = pools
        self._registry = registry
        self._journal_file = journal_file
        self._shared_journal = shared_journal
        self._ready = False
        self._version = __version__
        self._prometheus = CollectorRegistry(auto_describe=False)
        self._prometheus.register(self)
        ProcessCollector(registry=self._prometheus)

    def text(self, *, ready: bool) -> str:
        """All metrics in Prometheus' text format.

        Args:
            ready: Whether this process is ready.
        """
        self._ready = ready
        return generate_latest(self._prometheus).decode()

    def collect(self) -> Iterator[Metric]:
        """Give each metric with its present values."""
        yield from self._process()
        yield from self._operations()
        yield from self._episodes()
        yield from self._traffic()
        yield from self._workers()
        yield from self._journal()
        yield from self._gateway()
        yield from self._shared()

    def _process(self) -> Iterator[Metric]:
        role = "gateway" if self._settings.gateway else "server"
        yield _gauge("rollgym_build_info", "What runs", ("version", "role"), {(self._version, role): 1})
        yield _gauge("rollgym_processes", "I/O processes that these figures are of", (), {(): 1})
        yield _counter(
            "rollgym_process_restarts", "I/O processes started again", (), {(): self._rank.restarts}
        )
        yield _gauge("rollgym_ready", "Whether new sessions can be made", (), {(): self._ready})
        yield _histogram(
            "rollgym_event_loop_lag_seconds",
            "How late the event loop came to a timer, twice a second",
            (),
            {(): self._metrics.loop_lag},
        )
        # Whoever asks runs in the loop's thread.
        queued = queued_seconds()
        yield _counter(
            "rollgym_event_loop_queued_seconds",
            "Time that the event loop was ready to run and had no processor",
            (),
            {} if queued is None else {(): queued},
        )
        yield _counter(
            "rollgym_event_loop_holds",
            "Operations of environments that kept the event loop, and everybody, for long",
            ("env_id", "op", "isolation"),
            self._metrics.loop_holds,
        )

    def _operations(self) -> Iterator[Metric]:
        metrics = self._metrics
        answers: Counter[tuple[str, ...]] = Counter(metrics.failed)
        answers.update({(op, "ok"): count for op, count in metrics.answered.items()})
        yield _counter("rollgym_operations", "Operations answered", ("op", "code"), answers)
        yield _counter("rollgym_problems", "Answers that were problems", ("code",), metrics.problems)
        yield _counter("rollgym_refusals", "Refused for want of capacity", ("reason",), metrics.refusals)
        yield _histogram(
            "rollgym_operation_seconds",
            "From the call of an operation to its answer",
            ("op",),
            {(op,): durations for op, durations in metrics.seconds.items()},
        )
        times = {isolation: self._worker_pools.get(isolation).times for isolation in _ISOLATIONS}
        yield _histogram(
            "rollgym_environment_seconds",
            "Time that environments took",
            ("op", "isolation"),
            {(op, name): each for name, of in times.items() for op, each in of.ran.items()},
        )
        yield _histogram(
            "rollgym_queue_seconds",
            "Time that operations waited for their worker",
            ("op", "isolation"),
            {(op, name): each for name, of in times.items() for op, each in of.waited.items()},
        )

    def _episodes(self) -> Iterator[Metric]:
        metrics = self._metrics
        by_env = ("env_id",)
        sessions = Counter(session.entry.label for session in self._sessions.values())
        yield _gauge("rollgym_sessions", "Open sessions", by_env, sessions)
        yield _gauge(
            "rollgym_max_sessions",
            "Sessions that the server allows",
            (),
            {(): self._settings.max_sessions},
        )
        yield _counter("rollgym_sessions_ended", "Sessions ended", ("reason",), metrics.sessions_ended)
        yield _counter("rollgym_steps", "Steps taken", by_env, metrics.steps)
        yield _counter("rollgym_resets", "Episodes begun", by_env, metrics.resets)
        yield _counter(
            "rollgym_expert_resets", "Episodes begun with expert actions", by_env, metrics.expert_resets
        )
        yield _counter("rollgym_episodes", "Episodes ended", ("env_id", "outcome"), metrics.episodes)
        yield _counter("rollgym_verdicts", "Responses scored", ("env_id", "outcome"), metrics.verdicts)
        yield _counter("rollgym_runs", "Programs run for callers of run_code", ("outcome",), metrics.runs)
        yield _counter(
            "rollgym_rebuilds", "Environments rebuilt by replay", ("env_id", "outcome"), metrics.rebuilds
        )

    def _traffic(self) -> Iterator[Metric]:
        metrics = self._metrics
        by_transport = ("transport",)
        received = {"http": metrics.http_received, "websocket": metrics.socket_received}
        sent = {"http": metrics.http_sent, "websocket": metrics.socket_sent}
        yield _counter("rollgym_received_bytes", "Bytes of requests and frames", by_transport, received)
        yield _counter("rollgym_sent_bytes", "Bytes of responses and frames", by_transport, sent)
        yield _gauge("rollgym_sockets", "Open sockets", (), {(): metrics.sockets})
        yield _counter("rollgym_sockets_opened", "Sockets opened", (), {(): metrics.sockets_opened})

    def _workers(self) -> Iterator[Metric]:
        children = self._worker_pools.processes
        pids = children.pids()
        yield _gauge("rollgym_worker_processes", "Child processes for environments", (), {(): len(pids)})
        yield _gauge(
            "rollgym_worker_memory_bytes",
            "Resident memory of child processes",
            (),
            {(): sum(_resident_bytes(pid) for pid in pids)},
        )
        yield _counter(
            "rollgym_worker_restarts", "Child processes that ended", ("reason",), children.children_lost
        )
        yield _gauge(
            "rollgym_stuck_threads",
            "Threads left to calls that took too long",
            (),
            {(): self._worker_pools.threads.stuck},
        )

    def _journal(self) -> Iterator[Metric]:
        file = self._journal_file
        size, written, damage = (0, 0, 0) if file is None else (file.size, file.written, file.damage)
        yield _gauge("rollgym_journal_bytes", "Bytes of records in the journal", (), {(): size})
        yield _counter("rollgym_journal_written_bytes", "Bytes written to the journal", (), {(): written})
        yield _counter(
            "rollgym_journal_damage", "Places at which the journal lacked something", (), {(): damage}
        )

    def _gateway(self) -> Iterator[Metric]:
        metrics = self._metrics
        label = metrics.labels.of
        by_server = ("env_id", "protocol")
        registered = Counter((label(each.env_id), each.protocol) for each in self._registry)
        # An environment whose last server has gone has none, which is what somebody waits to be told.
        healthy = Counter(dict.fromkeys(metrics.labels.given, 0))
        healthy.update(label(each.env_id) for each in self._registry.healthy())
        yield _gauge("rollgym_registrations", "Registered servers", by_server, registered)
        yield _gauge(
            "rollgym_healthy_replicas", "Registered servers that take sessions", ("env_id",), healthy
        )
        yield _counter(
            "rollgym_registrations_ended",
            "Registrations ended",
            ("env_id", "reason"),
            metrics.registrations_ended,
        )
        yield _histogram(
            "rollgym_upstream_seconds",
            "Time that registered servers took to answer",
            ("op", "protocol"),
            metrics.upstream_seconds,
        )
        yield _counter(
            "rollgym_upstream_errors",
            "Calls that registered servers failed",
            by_server,
            metrics.upstream_errors,
        )
        yield _counter(
            "rollgym_failovers",
            "Operations tried again on another registered server",
            ("env_id",),
            metrics.failovers,
        )

    def _shared(self) -> Iterator[Metric]:
        """The journal that gateways share; names without figures where there is none."""
        journal = self._shared_journal
        yield _gauge(
            "rollgym_shared_journal_up",
            "Whether the journal that gateways share can be used",
            (),
            {} if journal is None else {(): journal.trouble is None},
        )
        yield _gauge(
            "rollgym_shared_journal_waiting",
            "What was seen of sessions and has not gone to the shared journal",
            (),
            {} if journal is None else {(): journal.waiting},
        )
        yield _counter(
            "rollgym_shared_journal_writes",
            "What was seen of sessions, by what became of it in the shared journal",
            ("status",),
            {} if journal is None else journal.writes,
        )
        yield _histogram(
            "rollgym_shared_journal_write_seconds",
            "From when something was seen of a session until the shared journal had it",
            (),
            {} if journal is None else {(): journal.write_seconds},
        )
        yield _counter(
            "rollgym_shared_journal_calls",
            "Calls to the shared journal's server",
            ("command", "outcome"),
            {} if journal is None else journal.calls,
        )
        yield _histogram(
            "rollgym_shared_journal_call_seconds",
            "Time that the shared journal's server took to answer",
            ("command",),
            {} if journal is None else {(name,): each for name, each in journal.call_seconds.items()},
        )
        yield _counter(
            "rollgym_shared_journal_sent_bytes",
            "Bytes of the records that were sent to the shared journal",
            (),
            {} if journal is None else {(): journal.sent_bytes},
        )


def _gauge(name: str, documentation: str, labels: tuple[str, ...], values: _Values) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for key, value in values.items():
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family


def _counter(name: str, documentation: str, labels: tuple[str, ...], values: _Values) -> Metric:
    family = CounterMetricFamily(name, documentation, labels=labels)
    for key, value in values.items():
        family.add_metric((key,) if isinstance(key, str) else key, value)
    return family


def _histogram(
    name: str, documentation: str, labels: tuple[str, ...], values: Mapping[Any, Durations]
) -> Metric:
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for key, durations in values.items():
        counts: Iterable[int] = itertools.accumulate(durations.counts)
        buckets = [(bound, float(count)) for bound, count in zip(_LE, counts, strict=True)]
        family.add_metric(key, buckets, durations.total)
    return family


def _resident_bytes(pid: int) -> int:
    """How much memory a process has, where the system says so (Linux)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def aggregate(texts: Iterable[str]) -> bytes:
    """Add up metrics in Prometheus' text format, sample by sample."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sums(texts))
    return generate_latest(registry)


class _Sums(Collector):
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
    if name in _LARGEST:
        return max(so_far, value)
    if name in _SMALLEST:
        return min(so_far, value)
    return so_far + value
