"""Metrics of several processes as if they were of one."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

# What says the same in each process, or is a point in time: a sum would mean nothing.
_LARGEST = frozenset({"rollgym_max_sessions", "rollgym_build_info", "process_max_fds"})
_SMALLEST = frozenset({"process_start_time_seconds", "rollgym_ready", "rollgym_shared_journal_up"})


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
