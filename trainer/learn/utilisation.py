"""How many of the model's operations a step did, and which part of the device's peak that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.config.run import RunSettings
from trainer.core.device import torch_device
from trainer.core.errors import ConfigError
from trainer.models.accelerators import accelerator_named
from trainer.models.flops import forward_flops, training_flops, utilisation
from trainer.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """What an update computes.

    Attributes:
        shape: The model.
        scored: Forward passes without gradient over all rows, such as that of the reference.
        epochs: Passes with gradient.
        frozen: Whether the model's own weights are frozen, beside adapters.
        critic: Whether a critic of the same body is read once and trained as often.
        peak_tflops: Most operations a second of a device, in 10^12; None where it is not known.
        devices: Devices that train.
    """

    shape: ModelShape
    scored: int
    epochs: int
    frozen: bool = False
    critic: bool = False
    peak_tflops: float | None = None
    devices: int = 1

    def flops(self, rows: Sequence[tuple[int, int]]) -> int:
        """Return the operations of an update, by the model's mathematics; see `trainer/models/flops.py`.

        Args:
            rows: Tokens of each row, and how many of them were sampled.
        """
        policy = training_flops(self.shape, rows, scored=self.scored, epochs=self.epochs, frozen=self.frozen)
        if not self.critic:
            return policy
        body = [(tokens, 0) for tokens, _ in rows]
        critic = training_flops(self.shape, body, epochs=self.epochs, frozen=self.frozen)
        return policy + critic + forward_flops(self.shape, body)

    def metrics(self, rows: Sequence[tuple[int, int]], train_s: float) -> dict[str, float]:
        """Return operations a second, and their part of the peak where that is known."""
        if train_s <= 0:
            return {}
        flops = self.flops(rows)
        numbers = {"time/model_tflops_per_s": flops / train_s / 1e12}
        if self.peak_tflops is not None:
            numbers["time/mfu"] = utilisation(flops, train_s, self.peak_tflops, self.devices)
        return numbers


def training_work(settings: RunSettings, config: Mapping[str, Any]) -> TrainingWork | None:
    """Return what the updates of a run compute; None for a model whose sizes are not known.

    The peaks that are known are those of bfloat16, so a run in fp32 has no utilisation.

    Args:
        settings: The run.
        config: The model's configuration, as its config.json has it.
    """
    try:
        shape = ModelShape.from_config(config)
    except ConfigError:
        return None  # a family that is not tested here: no number is better than a wrong one
    algorithm = settings.algorithm
    name = device_name(torch_device(settings.model.device))
    known = accelerator_named(name) if settings.model.dtype == "bf16" else None
    return TrainingWork(
        shape,
        scored=int(algorithm.needs_old_logprobs) + int(algorithm.needs_reference),
        epochs=algorithm.epochs,
        frozen=settings.model.lora is not None,
        critic=algorithm.critic is not None,
        peak_tflops=None if known is None else known.bf16_tflops,
        devices=settings.backend.ranks,
    )


def device_name(device: torch.device) -> str:
    """Return what torch calls a device, such as `NVIDIA H100 80GB HBM3`; empty where it calls it nothing."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if name is None else str(name(device))
