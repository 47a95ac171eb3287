"""Choices that depend on a run's device: the size of micro-batches, what is compiled, fused and packed; and a report.

Micro-batches are as large as the memory plan has room for. The plan is computed once, before anything is built, and is
part of the settings that ranks receive: all of them split batches alike.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rollgym.trainer.backends.base import StepKernels
from rollgym.trainer.config.optimizer import TOKENS_UNPLANNED
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import write_errors, write_whole
from rollgym.trainer.learn.utilisation import device_name
from rollgym.trainer.models.device import free_bytes, total_bytes
from rollgym.trainer.models.memory_plan import GIB
from rollgym.trainer.run.memory import model_shape, planned_micro_batch

CHOICES_FILE = "device.json"


def with_planned_micro_batch(settings: RunSettings) -> RunSettings:
    """Return the settings with micro-batches that the device has room for, if they do not set the size.

    On a CPU, or if sizes or memory are unknown, the settings stay unchanged.
    """
    if settings.optimizer.tokens_per_micro_batch != "auto":
        return settings
    device = torch_device(settings.model.device)
    memory = _memory_of(device, alone=settings.backend.in_process)
    if memory is None:
        return settings
    try:
        shape = model_shape(settings.model)
    except ConfigError:
        return settings  # as `say_choices` says
    chosen = planned_micro_batch(settings, shape, *memory)
    optimizer = settings.optimizer.planned(chosen)
    return settings.model_copy(update={"optimizer": optimizer})


def _memory_of(device: torch.device, *, alone: bool) -> tuple[int, int] | None:
    """Return an accelerator's total and free memory; None without an accelerator, or if torch does not report it.

    Args:
        device: The device.
        alone: Whether this process computes on it. If not, it must not allocate memory there to find out.
    """
    total = None if device.type == "cpu" else total_bytes(device)
    if total is None:
        return None
    free = free_bytes(device) if alone else None
    return total, total if free is None else free


@dataclass(frozen=True, slots=True)
class DeviceChoices:
    """How a run computes on its device: settings and automatic choices.

    Attributes:
        device: Its name.
        tokens_per_micro_batch: Tokens of a micro-batch.
        planned_gib: The peak that the memory plan expects, if the plan chose the size.
        compile: What compiles the layers.
        fused: Whether the optimizer takes a step in one kernel.
        packed_rows: Whether rows are packed one after another, without padding.
        dtype: The number format.
    """

    device: str
    tokens_per_micro_batch: int
    planned_gib: float | None
    compile: str | None
    fused: bool
    packed_rows: bool
    dtype: str

    @classmethod
    def of(cls, settings: RunSettings, kernels: StepKernels) -> "DeviceChoices":
        """Return those of a run whose models are there."""
        planned = settings.optimizer.planned_micro_batch
        device = torch_device(settings.model.device)
        elsewhere = settings.cluster.kind == "ray" and not settings.backend.in_process
        return cls(
            "the cluster" if elsewhere else device_name(device) or str(device),
            settings.optimizer.micro_batch_tokens,
            None if planned is None else round(planned.peak_bytes / GIB, 2),
            kernels.compiler,
            kernels.fused,
            kernels.packed,
            settings.model.dtype,
        )

    @property
    def line(self) -> str:
        """Return the choices as one line for people."""
        plan = "" if self.planned_gib is None else f" (at most {self.planned_gib:.1f} GiB by the memory plan)"
        parts = [
            f"micro-batches of {self.tokens_per_micro_batch} tokens{plan}",
            "rows packed" if self.packed_rows else "rows padded",
            "layers as they are" if self.compile is None else f"layers compiled by {self.compile}",
            *(["steps fused"] if self.fused else []),
            self.dtype,
        ]
        return f"training on {self.device}: {', '.join(parts)}"


def say_choices(settings: RunSettings, kernels: StepKernels) -> Iterator[str]:
    """Yield messages on how a run computes: on accelerators, and with other kernels than the default."""
    choices = DeviceChoices.of(settings, kernels)
    on_accelerator = torch_device(settings.model.device).type != "cpu"
    if on_accelerator or kernels != StepKernels():
        yield choices.line
    if not on_accelerator or settings.optimizer.tokens_per_micro_batch != "auto":
        return
    if settings.optimizer.planned_micro_batch is None:
        yield (
            f"optimizer.tokens_per_micro_batch auto: {TOKENS_UNPLANNED}, since the sizes of the model or the memory of "
            "the device were not known before it was loaded"
        )
    if settings.model.dtype == "fp32":
        yield "model.dtype fp32: model.dtype=bf16 takes less memory and time on an accelerator, and rows are packed"


def keep_choices(settings: RunSettings, kernels: StepKernels, directory: Path) -> None:
    """Write down what a run computes with, beside its settings.

    Raises:
        WriteError: If the disk does not take it.
    """
    content = asdict(DeviceChoices.of(settings, kernels))
    with write_errors(directory):
        write_whole(directory / CHOICES_FILE, json.dumps(content, indent=1) + "\n")
