"""The metrics of a server: each declared once, in the order in which they are shown."""

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollgym.clients.measuring.metrics import queued_seconds
from rollgym.clients.protocol.messages import Isolation
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.metrics import BOUNDS, Durations, Metrics, OperationTimes
from rollgym.env_server.common.settings import ServerSettings
from rollgym.env_server.gateway.registry import Registry
from rollgym.env_server.operations.runner import WorkerPools
from rollgym.env_server.sessions.journal_file import JournalFile
from rollgym.env_server.sessions.session import BaseSession
from rollgym.version import __version__

if TYPE_CHECKING:
    from rollgym.env_server.gateway.shared_journal import SharedJournal


StateT = TypeVar("StateT")
MetricKind = Literal["gauge", "counter", "histogram"]
Combine = Literal["sum", "largest", "smallest"]

_LE = (*map(str, BOUNDS), "+Inf")
_ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)


@dataclass(frozen=True)  # a generic class with slots cannot say what it is of
class ServerMetric(Generic[StateT]):
    """A metric of a server.

    Attributes:
        name: Its name, without the ending that counters have.
        kind: Its type in Prometheus.
        help: A short sentence, which goes out with it.
        values: The current values, by the value of its one label or by the values of several; for a histogram,
            durations.
        labels: Its labels.
        meaning: The text for the documentation, in Markdown, if it says more than `help`.
        combine: How to combine the figures of I/O processes. A figure that is equal in each process, or a point in
            time, is not summed.
    """

    name: str
    kind: MetricKind
    help: str
    values: Callable[[StateT], Mapping[Any, Any]]
    labels: tuple[str, ...] = ()
    meaning: str = ""
    combine: Combine = "sum"

    @property
    def exported(self) -> str:
        """Its name as queries have it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def described(self) -> str:
        """The text for the documentation."""
        return self.meaning or self.help[0].lower() + self.help[1:]

    def measured(self, state: StateT) -> Metric:
        """Return it with its present values."""
        values = self.values(state)
        if self.kind == "histogram":
            return self._histogram(values)
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.labels)
        for key, value in values.items():
            family.add_metric((key,) if isinstance(key, str) else key, value)
        return family

    def _histogram(self, values: Mapping[Any, Durations]) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for key, durations in values.items():
            counts: Iterable[int] = itertools.accumulate(durations.counts)
            buckets = [(bound, float(count)) for bound, count in zip(_LE, counts, strict=True)]
            family.add_metric((key,) if isinstance(key, str) else key, buckets, durations.total)
        return family


@dataclass(slots=True)
class ServerState:
    """The parts of one process that its figures are read from.

    Attributes:
        settings: The operator's settings.
        rank: Which process this is.
        metrics: The counters.
        sessions: The open sessions by their ids.
        pools: The workers.
        registry: The registrations.
        journal_file: The journal of sessions, if there is one.
        shared_journal: The journal that gateways share for sessions at nodes, if they share one.
        ready: Whether this process is ready.
    """

    settings: ServerSettings
    rank: ProcessRank
    metrics: Metrics
    sessions: Mapping[str, BaseSession]
    pools: WorkerPools
    registry: Registry
    journal_file: JournalFile | None
    shared_journal: "SharedJournal | None"
    ready: bool = False


_Metric = ServerMetric[ServerState]

_PROCESS = (
    _Metric(
        "rollgym_build_info",
        "gauge",
        "What runs",
        lambda server: {(__version__, "gateway" if server.settings.gateway else "server"): 1},
        ("version", "role"),
        "1; the role is `server` or `gateway`",
        combine="largest",
    ),
    _Metric(
        "rollgym_processes",
        "gauge",
        "I/O processes that these figures are of",
        lambda server: {(): 1},
        meaning="I/O processes in the figures",
    ),
    _Metric(
        "rollgym_process_restarts",
        "counter",
        "I/O processes started again",
        lambda server: {(): server.rank.restarts},
        meaning="I/O processes that were restarted",
    ),
    _Metric(
        "rollgym_ready",
        "gauge",
        "Whether new sessions can be made",
        lambda server: {(): server.ready},
        meaning="1 if new sessions can be made",
        combine="smallest",
    ),
    _Metric(
        "rollgym_event_loop_lag_seconds",
        "histogram",
        "How late the event loop came to a timer, twice a second",
        lambda server: {(): server.metrics.loop_lag},
        meaning="delay of a timer in the event loop, measured twice a second; about 0.001 s is normal",
    ),
    _Metric(
        "rollgym_event_loop_queued_seconds",
        "counter",
        "Time that the event loop was ready to run and had no processor",
        lambda server: _loop_queued(),
        meaning="time that the event loop waited for a processor (on Linux)",
    ),
    _Metric(
        "rollgym_event_loop_holds",
        "counter",
        "Operations of environments that kept the event loop, and everybody, for long",
        lambda server: server.metrics.loop_holds,
        ("env_id", "op", "isolation"),
        "operations that blocked the loop: for 0.1 s inline, or in a thread while the loop was 0.25 s late",
    ),
)

_OPERATIONS = (
    _Metric(
        "rollgym_operations",
        "counter",
        "Operations answered",
        lambda server: _answers(server.metrics),
        ("op", "code"),
        "operations answered; the code is `ok` or that of the problem",
    ),
    _Metric(
        "rollgym_problems",
        "counter",
        "Answers that were problems",
        lambda server: server.metrics.problems,
        ("code",),
        "all answers that were problems, also to requests that are not operations",
    ),
    _Metric(
        "rollgym_refusals",
        "counter",
        "Refused for want of capacity",
        lambda server: server.metrics.refusals,
        ("reason",),
        "refused for lack of capacity: `rate_limited`, `max_sessions`, `max_sessions_per_token`, `max_runs`, "
        "`max_runs_per_token`, `draining`, `overloaded`",
    ),
    _Metric(
        "rollgym_operation_seconds",
        "histogram",
        "From the call of an operation to its answer",
        lambda server: server.metrics.seconds,
        ("op",),
        "from call to answer",
    ),
    _Metric(
        "rollgym_environment_seconds",
        "histogram",
        "Time that environments took",
        lambda server: {(op, of): ran for of, times in _times(server.pools) for op, ran in times.ran.items()},
        ("op", "isolation"),
        "the environment's part of it (`inline`, `thread`, `process`)",
    ),
    _Metric(
        "rollgym_queue_seconds",
        "histogram",
        "Time that operations waited for their worker",
        lambda server: {
            (op, of): late for of, times in _times(server.pools) for op, late in times.waited.items()
        },
        ("op", "isolation"),
        "the part spent waiting for a thread or a child process",
    ),
)

_EPISODES = (
    _Metric(
        "rollgym_sessions",
        "gauge",
        "Open sessions",
        lambda server: Counter(session.entry.label for session in server.sessions.values()),
        ("env_id",),
    ),
    _Metric(
        "rollgym_max_sessions",
        "gauge",
        "Sessions that the server allows",
        lambda server: {(): server.settings.max_sessions},
        combine="largest",
    ),
    _Metric(
        "rollgym_sessions_ended",
        "counter",
        "Sessions ended",
        lambda server: server.metrics.sessions_ended,
        ("reason",),
        "`closed`, `evicted`, `lost`, `replay_diverged`",
    ),
    _Metric("rollgym_steps", "counter", "Steps taken", lambda server: server.metrics.steps, ("env_id",)),
    _Metric("rollgym_resets", "counter", "Episodes begun", lambda server: server.metrics.resets, ("env_id",)),
    _Metric(
        "rollgym_expert_resets",
        "counter",
        "Episodes begun with expert actions",
        lambda server: server.metrics.expert_resets,
        ("env_id",),
        "those among them with expert actions",
    ),
    _Metric(
        "rollgym_episodes",
        "counter",
        "Episodes ended",
        lambda server: server.metrics.episodes,
        ("env_id", "outcome"),
        "episodes ended: `success` (by the last info), else `terminated` or `truncated`; `error` if the environment "
        "raised, hung or could not be rebuilt; `abandoned` if it was reset, closed or cancelled",
    ),
    _Metric(
        "rollgym_verdicts",
        "counter",
        "Responses scored",
        lambda server: server.metrics.verdicts,
        ("env_id", "outcome"),
        "responses scored: `correct`, `wrong`, `partial`, `unparsable`, `timeout`, `error`, `other`",
    ),
    _Metric(
        "rollgym_runs",
        "counter",
        "Programs run for callers of run_code",
        lambda server: server.metrics.runs,
        ("outcome",),
        "programs of [`POST /run_code`](run_code.md#post-run_code), by how they ended: an outcome of the sandbox, or "
        "`cancelled`",
    ),
    _Metric(
        "rollgym_rebuilds",
        "counter",
        "Environments rebuilt by replay",
        lambda server: server.metrics.rebuilds,
        ("env_id", "outcome"),
        "environments rebuilt by replay, for a fork, a restore or after a crash: `ok`, `diverged`, `failed`",
    ),
)

_TRAFFIC = (
    _Metric(
        "rollgym_received_bytes",
        "counter",
        "Bytes of requests and frames",
        lambda server: {"http": server.metrics.http_received, "websocket": server.metrics.socket_received},
        ("transport",),
        "bytes of request bodies (`http`) and of frames (`websocket`)",
    ),
    _Metric(
        "rollgym_sent_bytes",
        "counter",
        "Bytes of responses and frames",
        lambda server: {"http": server.metrics.http_sent, "websocket": server.metrics.socket_sent},
        ("transport",),
        "the same of what was answered",
    ),
    _Metric("rollgym_sockets", "gauge", "Open sockets", lambda server: {(): server.metrics.sockets}),
    _Metric(
        "rollgym_sockets_opened",
        "counter",
        "Sockets opened",
        lambda server: {(): server.metrics.sockets_opened},
    ),
)

_WORKERS = (
    _Metric(
        "rollgym_worker_processes",
        "gauge",
        "Child processes for environments",
        lambda server: {(): len(server.pools.processes.pids())},
        meaning="child processes that hold environments",
    ),
    _Metric(
        "rollgym_worker_memory_bytes",
        "gauge",
        "Resident memory of child processes",
        lambda server: {(): sum(map(_resident_bytes, server.pools.processes.pids()))},
        meaning="their resident memory (on Linux; 0 elsewhere)",
    ),
    _Metric(
        "rollgym_worker_restarts",
        "counter",
        "Child processes that ended",
        lambda server: server.pools.processes.children_lost,
        ("reason",),
        "replaced child processes: `died`, `timeout` (an operation took too long), `start` (never ready)",
    ),
    _Metric(
        "rollgym_stuck_threads",
        "gauge",
        "Threads left to calls that took too long",
        lambda server: {(): server.pools.threads.stuck},
        meaning="threads held by calls that timed out",
    ),
)

_JOURNAL = (
    _Metric(
        "rollgym_journal_bytes",
        "gauge",
        "Bytes of records in the journal",
        lambda server: {(): 0 if server.journal_file is None else server.journal_file.size},
        meaning="bytes of records in the journals",
    ),
    _Metric(
        "rollgym_journal_written_bytes",
        "counter",
        "Bytes written to the journal",
        lambda server: {(): 0 if server.journal_file is None else server.journal_file.written},
        meaning="bytes written to them",
    ),
    _Metric(
        "rollgym_journal_damage",
        "counter",
        "Places at which the journal lacked something",
        lambda server: {(): 0 if server.journal_file is None else server.journal_file.damage},
        meaning="places where records were missing when the server started, such as after a loss of power; the "
        "sessions concerned are lost",
    ),
)

_GATEWAY = (
    _Metric(
        "rollgym_registrations",
        "gauge",
        "Registered servers",
        lambda server: Counter(
            (server.metrics.labels.of(each.env_id), each.protocol) for each in server.registry
        ),
        ("env_id", "protocol"),
        "gateway: registered servers",
    ),
    _Metric(
        "rollgym_healthy_replicas",
        "gauge",
        "Registered servers that take sessions",
        lambda server: _healthy(server.metrics, server.registry),
        ("env_id",),
        "gateway: servers that take new sessions (one that failed takes none for some seconds)",
    ),
    _Metric(
        "rollgym_registrations_ended",
        "counter",
        "Registrations ended",
        lambda server: server.metrics.registrations_ended,
        ("env_id", "reason"),
        "gateway: `left`, `expired` (no heartbeat in time) or `refused` (a loop of gateways)",
    ),
    _Metric(
        "rollgym_upstream_seconds",
        "histogram",
        "Time that registered servers took to answer",
        lambda server: server.metrics.upstream_seconds,
        ("op", "protocol"),
        "gateway: response time of registered servers",
    ),
    _Metric(
        "rollgym_upstream_errors",
        "counter",
        "Calls that registered servers failed",
        lambda server: server.metrics.upstream_errors,
        ("env_id", "protocol"),
        "gateway: calls that they failed",
    ),
    _Metric(
        "rollgym_failovers",
        "counter",
        "Operations tried again on another registered server",
        lambda server: server.metrics.failovers,
        ("env_id",),
        "gateway: operations tried again on another registered server",
    ),
)

# Names without figures if there is no such journal.
_SHARED_JOURNAL = (
    _Metric(
        "rollgym_shared_journal_up",
        "gauge",
        "Whether the journal that gateways share can be used",
        lambda server: _shared(server, lambda journal: {(): journal.trouble is None}),
        meaning="gateway with a [shared journal](gateway_journal.md): 1 if it can be used",
        combine="smallest",
    ),
    _Metric(
        "rollgym_shared_journal_waiting",
        "gauge",
        "What was seen of sessions and has not gone to the shared journal",
        lambda server: _shared(server, lambda journal: {(): journal.waiting}),
        meaning="records that wait to be written: above some hundreds the journal's server is too slow",
    ),
    _Metric(
        "rollgym_shared_journal_writes",
        "counter",
        "What was seen of sessions, by what became of it in the shared journal",
        lambda server: _shared(server, lambda journal: journal.writes),
        ("status",),
        "records: `ok` once written; `fenced`, `moving`, `gap`, `behind`, `taken`, `unsure` if another gateway was "
        "ahead; `missing`, `ended` if the session is gone; `away` if the journal is",
    ),
    _Metric(
        "rollgym_shared_journal_write_seconds",
        "histogram",
        "From when something was seen of a session until the shared journal had it",
        lambda server: _shared(server, lambda journal: {(): journal.write_seconds}),
        meaning="time to write a record, which every step waits for",
    ),
    _Metric(
        "rollgym_shared_journal_calls",
        "counter",
        "Calls to the shared journal's server",
        lambda server: _shared(server, lambda journal: journal.calls),
        ("command", "outcome"),
        "calls to its server: `write`, `open`, `load`, `claim`, `renew`, `moved`, `close`, `mark`; `ok`, `unconfirmed` "
        "where too few replicas confirmed it in time (`journal_replicas`), or `away` where no good answer came",
    ),
    _Metric(
        "rollgym_shared_journal_call_seconds",
        "histogram",
        "Time that the shared journal's server took to answer",
        lambda server: _shared(server, lambda journal: journal.call_seconds),
        ("command",),
        "time of the answered ones",
    ),
    _Metric(
        "rollgym_shared_journal_sent_bytes",
        "counter",
        "Bytes of the records that were sent to the shared journal",
        lambda server: _shared(server, lambda journal: {(): journal.sent_bytes}),
        meaning="bytes of the written records",
    ),
    _Metric(
        "rollgym_shared_journal_damage",
        "counter",
        "Sessions whose records in the shared journal were damaged or missing",
        lambda server: _shared(server, lambda journal: {(): journal.damage}),
        meaning="sessions whose records were damaged or missing; they are lost",
    ),
)

SERVER_METRICS = (
    *_PROCESS,
    *_OPERATIONS,
    *_EPISODES,
    *_TRAFFIC,
    *_WORKERS,
    *_JOURNAL,
    *_GATEWAY,
    *_SHARED_JOURNAL,
)
"""All metrics of a server; those of the process as such, such as its memory, are `prometheus_client`'s."""


def _loop_queued() -> dict[Any, float]:
    # The scrape runs in the loop's thread.
    queued = queued_seconds()
    return {} if queued is None else {(): queued}


def _answers(metrics: Metrics) -> Counter[tuple[str, ...]]:
    answers: Counter[tuple[str, ...]] = Counter(metrics.failed)
    answers.update({(op, "ok"): count for op, count in metrics.answered.items()})
    return answers


def _times(pools: WorkerPools) -> list[tuple[str, OperationTimes]]:
    return [(isolation, pools.get(isolation).times) for isolation in _ISOLATIONS]


def _healthy(metrics: Metrics, registry: Registry) -> Counter[str]:
    # An environment whose last server has left shows zero, which is the figure that alerts watch for.
    healthy = Counter(dict.fromkeys(metrics.labels.given, 0))
    healthy.update(metrics.labels.of(each.env_id) for each in registry.healthy())
    return healthy


def _shared(server: ServerState, values: Callable[["SharedJournal"], Mapping[Any, Any]]) -> Mapping[Any, Any]:
    return {} if server.shared_journal is None else values(server.shared_journal)


def _resident_bytes(pid: int) -> int:
    """The memory of a process in bytes, if the system reports it (Linux); otherwise 0."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
