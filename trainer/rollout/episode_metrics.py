"""What an environment counts about an episode, from one number a turn to one an episode."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

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
        how: How each aggregates over the turns, by name: a key of `AGGREGATIONS`. What is not named counts on by
            itself, and its last value is taken.

    Raises:
        ValueError: If there is no such way.
    """

    def __init__(self, how: Mapping[str, str]) -> None:
        for name, way in how.items():
            if way not in AGGREGATIONS:
                raise ValueError(
                    f"metric {name!r} aggregates by {way!r}; known are {', '.join(AGGREGATIONS)}"
                )
        self._how = how
        self._values: dict[str, list[float]] = {}

    def add(self, info: Mapping[str, Any]) -> None:
        """Take in what a turn's info says; anything but numbers is passed over."""
        metrics = info.get("metrics")
        if isinstance(metrics, Mapping):
            for name, value in metrics.items():
                if isinstance(value, int | float | bool):
                    self._values.setdefault(name, []).append(float(value))

    def totals(self) -> dict[str, float]:
        """One number a metric."""
        return {
            name: AGGREGATIONS[self._how.get(name, "last")](values) for name, values in self._values.items()
        }
