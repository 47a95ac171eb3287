"""Settings of what computes the training steps: one process, or several ranks that share a model's weights.

Each kind of training back-ends is declared once: what it divides, reads, needs, and does not train with.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from rollgym.suggestions import alternatives
from rollgym.trainer.core.kinds import Named
from rollgym.trainer.core.strict import Amount, Seconds, Settings

if TYPE_CHECKING:
    from rollgym.trainer.config.run import RunSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """How a back-end lays a model in training on devices, for the plan of the memory that a run needs.

    The facts of each back-end of ours, and the formulas that read them, are in `rollgym.trainer.models.memory_plan`.

    Attributes:
        stage: What it divides over the data-parallel ranks, by the stages of ZeRO (arXiv:1910.02054). 0: nothing; 1:
            the optimizer's numbers; 2: gradients too; 3: weights too. None: as `backend.zero_stage` says.
        weights: The weights that the optimizer changes. "computed": those that are computed with, and an fp32 copy
            beside them where they are in bf16; "copied": an fp32 copy beside them always; "fp32": in fp32 alone, and
            what is computed with is gathered out of them.
        gradients_as_computed: Whether gradients are in the type that is computed in, and not in fp32.
        steps_at_once: Whether AdamW goes over all weights at once, which takes one more number for each.
        offloads_all: Whether `backend.cpu_offload` moves gradients and undivided weights to the host, too.
        divides_ends: Whether tensor parallelism divides embeddings and logits.
        divides_between: Whether `backend.sequence_parallel` divides what lies between the matrices of a layer.
    """

    stage: int | None = 0
    weights: Literal["computed", "copied", "fp32"] = "computed"
    gradients_as_computed: bool = False
    steps_at_once: bool = False
    offloads_all: bool = False
    divides_ends: bool = False
    divides_between: bool = False


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
        memory=MemoryLayout(steps_at_once=True),
    ),
    BackendKind(
        name="fsdp2",
        described="several ranks with torch's sharding of weights, gradients and optimizer state; `mesh.tensor` also "
        "divides layers",
        memory=MemoryLayout(stage=3, weights="fp32", steps_at_once=True, offloads_all=True),
        dimensions=("data", "tensor"),
        reads=("cpu_offload",),
        refusals=_fsdp2_refusals,
        maker="rollgym.trainer.run.layout:FSDP2",
    ),
    BackendKind(
        name="deepspeed",
        described="several ranks, ZeRO at stage 1, 2 or 3; the extra `[deepspeed]`",
        memory=MemoryLayout(stage=None, weights="copied", gradients_as_computed=True),
        dimensions=("data",),
        reads=("zero_stage", "cpu_offload"),
        package="deepspeed",
        refusals=_deepspeed_refusals,
        maker="rollgym.trainer.run.layout:DEEPSPEED",
    ),
    BackendKind(
        name="megatron",
        described="several ranks with a GPU each: Megatron-Core divides layers, stages, rows and experts; the extra "
        "`[megatron]`",
        memory=MemoryLayout(stage=1, divides_ends=True, divides_between=True),
        dimensions=("data", "tensor", "pipeline", "context", "expert"),
        reads=("sequence_parallel",),
        package="megatron",
        on_gpus_only=True,
        refusals=_megatron_refusals,
        maker="rollgym.trainer.run.layout:MEGATRON",
    ),
)
"""Ours, in the order of the documentation."""

BACKENDS_BY_NAME: Named[BackendKind] = Named(
    "rollgym.backends", BackendKind, MappingProxyType({each.name: each for each in BACKENDS})
)
"""All of them by name, with those of other packages."""


class MeshSettings(Settings):
    """How ranks share the work; the product of all but `expert` is their number."""

    data: Amount | None = Field(
        None, description="Parts of the batch; absent: the ranks that the other dimensions leave."
    )
    tensor: Amount = Field(1, description="Parts of each layer's weights.")
    pipeline: Amount = Field(1, description="Parts of the layers, one after the other.")
    context: Amount = Field(1, description="Parts of each row.")
    expert: Amount = Field(1, description="Parts of the experts of a layer, over the ranks of `data`.")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one whole model together, if `data` shares no weights."""
        return self.tensor * self.pipeline * self.context


class BackendSettings(Settings):
    """The backend that computes the training steps of the policy and the critic."""

    kind: Annotated[str, BACKENDS_BY_NAME] = Field(
        "torch",
        description=" ".join(f"{each.name}: {each.described}." for each in BACKENDS),
    )
    ranks: Amount = Field(1, description="Processes that share the model, each with a device of its own.")
    mesh: MeshSettings = MeshSettings()
    zero_stage: Literal[1, 2, 3] = Field(
        3,
        description="deepspeed: what is divided over the ranks. 1: the optimizer's state; 2: gradients too; 3: weights "
        "too.",
    )
    cpu_offload: bool = Field(
        False,
        description="fsdp2, deepspeed: hold weights (fsdp2, and deepspeed at stage 3) and the optimizer's state in the "
        "processor's memory: less memory of the device, slower steps.",
    )
    sequence_parallel: bool = Field(
        True,
        description="megatron: with mesh.tensor above 1, the ranks of a layer share what lies between the layers, too: "
        "less memory for activations, as much to exchange. Experts need it.",
    )
    sharded_checkpoints: bool = Field(
        False,
        description="Several ranks: each writes its own pieces of a checkpoint, into an output_dir that all "
        "machines share, in place of gathering all of it in the run's process. Any number of ranks can resume from "
        "either kind.",
    )
    timeout_s: Seconds = Field(
        1800.0,
        description="How long a rank waits for the others in one exchange; a rank that dies is noticed at once.",
    )

    @property
    def what(self) -> BackendKind:
        """What is to be known of its kind."""
        return BACKENDS_BY_NAME[self.kind]

    @property
    def in_process(self) -> bool:
        """Whether the run's own process computes the steps, without ranks."""
        return not self.what.dimensions

    @property
    def data(self) -> int:
        """Number of ranks that share the batch (data parallel)."""
        return self.mesh.data or max(1, self.ranks // self.mesh.model_ranks)

    @model_validator(mode="after")
    def _ranks_are_the_mesh(self) -> Self:
        if self.in_process:
            if odd := self.changed(*sorted(set(type(self).model_fields) - {"kind"})):
                read_by_some = {name for each in BACKENDS for name in each.reads}.intersection(odd)
                fitting = [each for each in BACKENDS if each.dimensions and read_by_some <= set(each.reads)]
                divided = alternatives([each.name for each in fitting])
                raise ValueError(
                    f"{', '.join(odd)}: kind '{self.kind}' computes in the run's own process and reads none of it: set "
                    f"kind to {divided}, or leave it out"
                )
            return self
        sizes = {name: getattr(self.mesh, name) for name in MeshSettings.model_fields}
        known = self.what.dimensions
        for name, size in sizes.items():
            if name not in known and size not in (None, 1):
                others = [each.name for each in BACKENDS if name in each.dimensions]
                remedy = f"set kind to {others[0]}, or leave" if others else "leave"
                raise ValueError(
                    f"mesh.{name} {size}: kind '{self.kind}' divides {' and '.join(known)} only: {remedy} "
                    f"mesh.{name} out"
                )
        product = self.data * self.mesh.model_ranks
        if product != self.ranks:
            shown = " x ".join(
                f"{name} {self.data if name == 'data' else sizes[name]}" for name in known if name != "expert"
            )
            raise ValueError(
                f"ranks {self.ranks} is not the mesh's product ({shown} is {product}): set ranks to {product}, or "
                "another mesh"
            )
        if self.data % self.mesh.expert:
            raise ValueError(
                f"mesh.expert {self.mesh.expert} does not divide the {self.data} ranks of mesh.data"
            )
        for name in dict.fromkeys(name for each in BACKENDS for name in each.reads):
            if name not in self.what.reads and self.changed(name):
                kinds = [each.name for each in BACKENDS if name in each.reads]
                named = " and ".join(f"'{kind}'" for kind in kinds)
                word = "kind" if len(kinds) == 1 else "kinds"
                raise ValueError(f"{name} is read by {word} {named} only, not by '{self.kind}': leave it out")
        return self
