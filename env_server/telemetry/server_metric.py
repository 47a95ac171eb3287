"""A metric of a server: declared once, with its meaning, and how to combine the figures of several processes."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from rollgym.env_server.telemetry.durations import BOUNDS, Durations

StateT = TypeVar("StateT")
MetricKind = Literal["gauge", "counter", "histogram"]
Combine = Literal["sum", "largest", "smallest"]

_LE = (*map(str, BOUNDS), "+Inf")


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
