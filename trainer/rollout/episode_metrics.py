"""An environment's metrics of an episode, aggregated from one number per turn to one per episode."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rollgym.trainer.core.errors import ConfigError, InvalidNumberError
from rollgym.trainer.core.numbers import finite_number

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {
        "last": lambda values: values[-1],
        "sum": sum,
        "mean": lambda values: sum(values) / len(values),
        "max": max,
        "min": min,
    }
)


class EpisodeMetrics:
    """Collects `info["metrics"]` turn by turn.

    Args:
        how: How each metric aggregates over the turns, by name: a key of `AGGREGATIONS`. For a metric without an entry
            the last value is taken.

    Raises:
        ConfigError: If an aggregation is unknown.
    """

    def __init__(self, how: Mapping[str, str]) -> None:
        if not isinstance(how, Mapping):
            raise ConfigError(
                f"an environment's metadata['metrics'] must name how each aggregates, not {how!r:.100}"
            )
        for name, way in how.items():
            if not isinstance(way, str) or way not in AGGREGATIONS:
                raise ConfigError(
                    f"metric {name!r} aggregates by {way!r}; known are {', '.join(AGGREGATIONS)}"
                )
        self._how = how
        self._values: dict[str, list[float]] = {}
        self._refused = 0

    def add(self, info: Mapping[str, Any]) -> None:
        """Read the metrics of a turn's info: numbers, and booleans as 1 and 0; anything else is ignored.

        A number that is not finite is ignored, too, and counted as `metrics_refused`.
        """
        metrics = info.get("metrics")
        if not isinstance(metrics, Mapping):
            return
        for name, value in metrics.items():
            if isinstance(value, bool):
                self._values.setdefault(name, []).append(float(value))
            elif isinstance(value, int | float):
                self._take(name, value)

    def _take(self, name: str, value: float) -> None:
        try:
            number = finite_number(value, name)
        except InvalidNumberError:
            self._refused += 1
        else:
            self._values.setdefault(name, []).append(number)

    def totals(self) -> dict[str, float]:
        """Return the aggregated value of each metric."""
        totals = {
            name: AGGREGATIONS[self._how.get(name, "last")](values) for name, values in self._values.items()
        }
        return totals | ({"metrics_refused": float(self._refused)} if self._refused else {})
