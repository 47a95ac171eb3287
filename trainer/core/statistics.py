"""Confidence intervals for success rates, their differences, and means."""

import math

from clients.measuring.statistics import Z_95, Interval, success_rate

__all__ = ["Z_95", "Interval", "mean_interval", "rate_difference", "success_rate"]


def rate_difference(before: Interval, after: Interval) -> Interval:
    """Return the interval of `after - before` from two Wilson intervals (Newcombe 1998, method 10).

    The two samples are treated as independent. On one fixed panel they are positively related, so this is wider than
    it need be, never narrower.
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
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    half = Z_95 * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)
