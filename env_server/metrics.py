"""What a server counts, as Prometheus metrics with stable names and bounded labels."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)


class Metrics(Collector):
    """Counters of one I/O process.

    What is counted at every step is a plain integer in a dictionary, and becomes a metric when somebody looks:
    a locked counter object would cost as much as the rest of a step's handling.

    Attributes:
        operations: Calls by operation.
        problems: Answers that were problems, by code.
        steps: Steps by environment.
        resets: Episodes begun by environment.
        expert_resets: Those among them with expert actions.
        verdicts: Verdicts by environment and outcome.
        sockets: Open sockets.
        seconds: How long operations took in workers, by operation and isolation.
    """

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.resets: Counter[str] = Counter()
        self.expert_resets: Counter[str] = Counter()
        self.verdicts: Counter[tuple[str, str]] = Counter()
        self.sockets = 0
        self._ended: Counter[str] = Counter()
        self._sessions: Callable[[], Mapping[str, int]] = dict
        self._max_sessions = 0
        self._registry = CollectorRegistry(auto_describe=False)
        self.seconds = Histogram(
            "rollgym_worker_operation_seconds",
            "Time of operations in worker threads and processes",
            ["op", "isolation"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch_sessions(self, sessions: Callable[[], Mapping[str, int]], max_sessions: int) -> None:
        """Say where the number of open sessions by environment is to be seen."""
        self._sessions = sessions
        self._max_sessions = max_sessions

    def session_ended(self, reason: str) -> None:
        """Count a session that ended."""
        self._ended[reason] += 1

    def collect(self) -> Iterator[Metric]:
        """Turn the plain counters into metrics."""
        yield _counter("rollgym_operations", "Operations called", "op", self.operations)
        yield _counter("rollgym_problems", "Operations answered by a problem", "code", self.problems)
        yield _counter("rollgym_steps", "Steps taken", "env_id", self.steps)
        yield _counter("rollgym_resets", "Episodes begun", "env_id", self.resets)
        yield _counter(
            "rollgym_expert_resets", "Episodes begun with expert actions", "env_id", self.expert_resets
        )
        yield _counter("rollgym_sessions_ended", "Sessions ended", "reason", self._ended)
        verdicts = CounterMetricFamily("rollgym_verdicts", "Responses scored", labels=["env_id", "outcome"])
        for (env_id, outcome), value in self.verdicts.items():
            verdicts.add_metric([env_id, outcome], value)
        yield verdicts
        sessions = GaugeMetricFamily("rollgym_sessions", "Open sessions", labels=["env_id"])
        for env_id, value in self._sessions().items():
            sessions.add_metric([env_id], value)
        yield sessions
        yield GaugeMetricFamily("rollgym_max_sessions", "Sessions that the server allows", self._max_sessions)
        yield GaugeMetricFamily("rollgym_sockets", "Open sockets", self.sockets)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _counter(name: str, documentation: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
