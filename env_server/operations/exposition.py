"""The metrics of a server as Prometheus' text: of one I/O process, or of all together."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rollgym.env_server.operations.server_metrics import SERVER_METRICS, Combine, ServerState

# Metrics of the process itself that are not summed over the processes.
_OF_PROCESSES: dict[str, Combine] = {
    "process_max_fds": "largest",
    "process_start_time_seconds": "smallest",
}
_COMBINED = {metric.name: metric.combine for metric in SERVER_METRICS} | _OF_PROCESSES


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
