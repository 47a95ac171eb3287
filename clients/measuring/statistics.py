"""Confidence intervals for success rates."""

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def success_rate(successes: int, trials: int) -> Interval:
    """Return the Wilson score interval (Wilson 1927) of a success rate.

    Raises:
        ValueError: If there were no trials.
    """
    if trials <= 0:
        raise ValueError("a rate needs at least one trial")
    rate = successes / trials
    scale = 1.0 + Z_95**2 / trials
    centre = (rate + Z_95**2 / (2 * trials)) / scale
    half = Z_95 / scale * math.sqrt(rate * (1 - rate) / trials + Z_95**2 / (4 * trials**2))
    # At 0 and at all successes the bound is exact; rounding must not put the estimate outside.
    return Interval(rate, min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half)))
