"""How many of the model's operations a step did, and which part of the device's peak that is.

Operations are those that training needs by the model's mathematics (PaLM, arXiv:2204.02311, appendix B). A product with
a matrix of N numbers is 2 N operations a token forwards, and twice as many backwards: once for what came in, once for
the weights. Attention of a token to t tokens is 4 t operations for each number of a query: scores, and the weighted
sum. Unlike PaLM's, the count is of causal attention: a token attends to those before it and itself, not to the whole
row. Logits count at sampled tokens, the only place of their computation. Recomputation to save memory, padding,
norms and the optimizer are not the model's, and are not counted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """The operations of an update.

    Attributes:
        shape: The model.
        scored: Forward passes without gradient over all rows, such as that of the reference.
        epochs: Passes with gradient.
        frozen: Whether the model's own weights are frozen, beside adapters.
        critic: Whether a critic of the same body is read once and trained as often.
        peak_tflops: Most operations a second of a device, in 10^12; None if unknown.
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
        """Return the operations of an update, by the model's mathematics.

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
        """Return operations a second, and their part of the peak if the peak is known."""
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
    """Return what torch calls a device, such as `NVIDIA H100 80GB HBM3`; empty if it has no name."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if name is None else str(name(device))


def forward_flops(shape: ModelShape, rows: Iterable[tuple[int, int]]) -> int:
    """Return the operations of one forward pass.

    Args:
        shape: The model.
        rows: Tokens of each row, and how many of them were sampled.
    """
    layers, logits, per_pair = (
        2 * shape.matrices_per_token,
        2 * shape.hidden * shape.vocabulary,
        4 * shape.layers * shape.query_width,
    )
    return sum(
        layers * tokens + logits * sampled + per_pair * (tokens * (tokens + 1) // 2)
        for tokens, sampled in rows
    )


def training_flops(
    shape: ModelShape,
    rows: Iterable[tuple[int, int]],
    *,
    scored: int = 0,
    epochs: int = 1,
    frozen: bool = False,
) -> int:
    """Return the operations of an update of the policy.

    Args:
        shape: The model.
        rows: Tokens of each row, and how many of them were sampled.
        scored: Forward passes over all rows without gradient, such as that of a reference model.
        epochs: Passes over the rows with gradient.
        frozen: Whether the model's own weights are frozen, as beside LoRA's adapters: they need no gradient.
    """
    return forward_flops(shape, rows) * (scored + epochs * (2 if frozen else 3))


def utilisation(flops: float, seconds: float, peak_tflops: float, devices: int = 1) -> float:
    """Return which part of the devices' peak was used (model FLOPs utilisation), between 0 and 1."""
    return flops / (seconds * peak_tflops * 1e12 * devices) if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind.

    Attributes:
        name: Part of the name that torch gives it.
        bf16_tflops: Peak of dense bfloat16 products, in 10^12 operations a second.
    """

    name: str
    bf16_tflops: float


# Peaks are those of dense bfloat16 matrix products, without sparsity, from their makers' data sheets. What torch sees
# of an MI250X is one of its two dies.
# The first one whose name is part of the device's is taken: longer names before those that they begin with.
ACCELERATORS = (
    Accelerator("B200", 2250.0),
    Accelerator("H200", 989.4),
    Accelerator("H100 PCIe", 756.5),
    Accelerator("H100 NVL", 835.0),
    Accelerator("H100", 989.4),
    Accelerator("H800", 989.4),
    Accelerator("H20", 148.0),
    Accelerator("A100-SXM4-40GB", 312.0),
    Accelerator("A100-PCIE-40GB", 312.0),
    Accelerator("A100", 312.0),
    Accelerator("A800", 312.0),
    Accelerator("A10G", 70.0),
    Accelerator("L40S", 362.05),
    Accelerator("L4", 121.0),
    Accelerator("RTX 4090", 165.2),
    Accelerator("MI325X", 1307.4),
    Accelerator("MI300X", 1307.4),
    Accelerator("MI250X", 191.5),
)


def accelerator_named(name: str) -> Accelerator | None:
    """Return what is known of a device, by the name that torch gives it; None if nothing is."""
    folded = name.casefold()
    return next((each for each in ACCELERATORS if each.name.casefold() in folded), None)
