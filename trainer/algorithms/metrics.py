"""Metrics that micro-batches and shards can add up: each is a sum and the count that it is divided by."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer.core.device import widest_float

Metrics = dict[str, tuple[float, float]]


def collect(parts: Mapping[str, tuple[Tensor, Tensor]]) -> Metrics:
    """Return tensor metrics as plain numbers, with one transfer from the device for all of them."""
    if not parts:
        return {}
    numbers = [number.detach() for pair in parts.values() for number in pair]
    wide = widest_float(numbers[0].device)
    flat = torch.stack([number.to(wide) for number in numbers]).tolist()
    return {name: (flat[2 * place], flat[2 * place + 1]) for place, name in enumerate(parts)}


def merge(parts: Iterable[Metrics]) -> Metrics:
    """Return the metrics of several parts of a batch taken together."""
    merged: Metrics = {}
    for part in parts:
        for name, (total, count) in part.items():
            before = merged.get(name, (0.0, 0.0))
            merged[name] = (before[0] + total, before[1] + count)
    return merged


def means(metrics: Metrics) -> dict[str, float]:
    """Return each metric's mean; a metric that nothing counted towards is left out."""
    return {name: total / count for name, (total, count) in metrics.items() if count > 0}
