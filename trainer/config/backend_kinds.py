"""The kinds of training back-ends, each declared once: what it divides, reads, needs, and does not train with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from rollgym.trainer.core.kinds import Named

if TYPE_CHECKING:
    from rollgym.trainer.config.run import RunSettings

MemoryLayout = Literal["torch", "fsdp2", "deepspeed", "megatron"]
"""How weights, gradients and the optimizer's numbers lie on devices."""


def _none(settings: "RunSettings") -> Iterator[str]:
    yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """A training back-end.

    Attributes:
        name: Its name in `backend.kind`.
        described: What it is, in Markdown, for the documentation's table.
        memory: How its models lie on devices, for the plan of the memory that a run needs.
        dimensions: Which parts of the mesh it divides; none trains in the run's own process.
        reads: Settings of `backend` that it alone, or with some others, reads.
        package: What it needs beside torch, with an extra of its own name; empty for nothing.
        on_gpus_only: Whether it computes on CUDA devices only.
        refusals: Yields what of a run it does not train with, whatever the model, and what to take in its place.
        maker: `module:attribute` of the `RankMaker` that makes the ranks' parts of models; imported by ranks.
    """

    name: str
    described: str
    memory: MemoryLayout
    dimensions: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    package: str = ""
    on_gpus_only: bool = False
    refusals: "Callable[[RunSettings], Iterator[str]]" = _none
    maker: str = ""


def _fsdp2_refusals(settings: "RunSettings") -> Iterator[str]:
    yield from _of_ranks(settings)
    tensor = settings.backend.mesh.tensor
    if tensor > 1 and settings.model.lora is not None:
        yield (
            f"backend.mesh.tensor {tensor}: adapters (model.lora) are not divided by tensor parallelism here: set "
            "backend.mesh.tensor=1, or train all weights"
        )


def _deepspeed_refusals(settings: "RunSettings") -> Iterator[str]:
    yield from _of_hooks(settings)


def _megatron_refusals(settings: "RunSettings") -> Iterator[str]:
    yield from _of_hooks(settings)
    if settings.reward is not None:
        yield "reward: backend.kind megatron trains no reward models: take kind torch, fsdp2 or deepspeed"
    if settings.optimizer.fused is True:
        yield (
            "optimizer.fused: Megatron-Core takes its steps by the kernels that it finds (TransformerEngine's, Apex's "
            "or torch's): leave it out"
        )
    if settings.optimizer.packed_rows == "on":
        yield "optimizer.packed_rows on: Megatron's attention is given rows of equal length here: leave it out"
    if settings.model.lora is not None:
        yield (
            "model.lora: adapters are not trained by backend.kind megatron: take backend.kind fsdp2 or deepspeed, or "
            "leave model.lora out"
        )


def _of_hooks(settings: "RunSettings") -> Iterator[str]:
    """What back-ends refuse that put hooks of their own into a model."""
    kind = settings.backend.kind
    if settings.model.compile not in (None, "auto"):
        yield (
            f"model.compile: what backend.kind {kind} hooks into a model is not compiled with: leave it out, or take "
            "kind torch or fsdp2"
        )
    yield from _of_ranks(settings)
    if settings.distill is not None and settings.distill.estimate != "sampled":
        yield (
            f"backend.kind {kind} computes no teachers beside the student: take kind torch or fsdp2, or "
            "distill.estimate=sampled"
        )


def _of_ranks(settings: "RunSettings") -> Iterator[str]:
    """What back-ends refuse that divide a model."""
    if settings.model.kernels == "liger":
        yield (
            f"model.kernels liger: backend.kind {settings.backend.kind} takes models apart, which Liger's classes are "
            "not tried with: leave it out; model.compile fuses as much"
        )


BACKENDS = (
    BackendKind(
        name="torch",
        described="one process, the run's own (the default)",
        memory="torch",
    ),
    BackendKind(
        name="fsdp2",
        described="several ranks with torch's sharding of weights, gradients and optimizer state; `mesh.tensor` also "
        "divides layers",
        memory="fsdp2",
        dimensions=("data", "tensor"),
        reads=("cpu_offload",),
        refusals=_fsdp2_refusals,
        maker="rollgym.trainer.assembly.rank_makers:FSDP2",
    ),
    BackendKind(
        name="deepspeed",
        described="several ranks, ZeRO at stage 1, 2 or 3; the extra `[deepspeed]`",
        memory="deepspeed",
        dimensions=("data",),
        reads=("zero_stage", "cpu_offload"),
        package="deepspeed",
        refusals=_deepspeed_refusals,
        maker="rollgym.trainer.assembly.rank_makers:DEEPSPEED",
    ),
    BackendKind(
        name="megatron",
        described="several ranks with a GPU each: Megatron-Core divides layers, stages, rows and experts; the extra "
        "`[megatron]`",
        memory="megatron",
        dimensions=("data", "tensor", "pipeline", "context", "expert"),
        reads=("sequence_parallel",),
        package="megatron",
        on_gpus_only=True,
        refusals=_megatron_refusals,
        maker="rollgym.trainer.assembly.rank_makers:MEGATRON",
    ),
)
"""Ours, in the order of the documentation."""

KINDS: Named[BackendKind] = Named(
    "rollgym.backends", BackendKind, MappingProxyType({each.name: each for each in BACKENDS})
)
"""All of them by name, with those of other packages."""
