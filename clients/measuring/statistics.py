"""Confidence intervals for success rates, their differences, and means."""

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
        ValueError: If the number of trials is 0.
    """
    if trials <= 0:
        raise ValueError("a rate needs at least one trial")
    rate = successes / trials
    scale = 1.0 + Z_95**2 / trials
    centre = (rate + Z_95**2 / (2 * trials)) / scale
    half = Z_95 / scale * math.sqrt(rate * (1 - rate) / trials + Z_95**2 / (4 * trials**2))
    # At 0 and at all successes the bound is exact; rounding must not put the estimate outside.
    return Interval(rate, min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half)))


def rate_difference(before: Interval, after: Interval) -> Interval:
    """Return the interval of `after - before` from two Wilson intervals (Newcombe 1998, method 10).

    The two samples are treated as independent. On one fixed evaluation set they are positively related, so this is
    wider than it need be, never narrower.
    """
    difference = after.value - before.value
    low = difference - math.hypot(after.value - after.low, before.high - before.value)
    high = difference + math.hypot(after.high - after.value, before.value - before.low)
    return Interval(difference, low, high)


def mean_interval(values: list[float]) -> Interval:
    """Return the mean of `values` with its normal 95 % interval."""
    count = len(values)
    if count == 0:
        raise ValueError("a mean needs at least one value")
    mean = sum(values) / count
    if count == 1:
        return Interval(mean, mean, mean)
    # Not by `**`, which raises for the large ones.
    variance = sum((value - mean) * (value - mean) for value in values) / (count - 1)
    half = Z_95 * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)
