"""The optimizer and its learning rate, as the settings name them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rollgym.trainer.config.optimizer import OptimizerSettings


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate by step: linear warm-up, then constant, linear or cosine to zero.

    Attributes:
        peak: The rate after the warm-up.
        warmup_steps: Steps of the warm-up.
        total_steps: Steps of the run, where a decaying schedule ends.
        kind: "constant", "linear" or "cosine".
    """

    peak: float
    warmup_steps: int
    total_steps: int
    kind: str

    def rate(self, step: int) -> float:
        """Return the rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "linear":
            return self.peak * (1.0 - progress)
        if self.kind == "cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak


def make_optimizer(
    settings: OptimizerSettings, parameters: Iterable[torch.Tensor], rate: float
) -> torch.optim.Optimizer:
    """Return the optimizer of some parameters.

    Args:
        settings: Which one, and its numbers.
        parameters: What it steps.
        rate: Learning rate of the first step.
    """
    parameters = list(parameters)
    if settings.fused == "auto" and all(each.device.type != "cpu" for each in parameters):
        try:
            return _made(settings, parameters, rate, fused=True)
        except RuntimeError as error:  # of devices that have no such kernel
            if "fused" not in str(error):
                raise
    return _made(settings, parameters, rate, fused=settings.fused is True)


def _made(
    settings: OptimizerSettings, parameters: list[torch.Tensor], rate: float, *, fused: bool
) -> torch.optim.Optimizer:
    kernel = fused or None  # None lets torch choose among the others
    if settings.kind == "sgd":
        return torch.optim.SGD(parameters, lr=rate, weight_decay=settings.weight_decay, fused=kernel)
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        fused=kernel,
    )
