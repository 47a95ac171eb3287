"""Settings of what computes the training steps: one process, or several ranks that share a model's weights."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollgym.trainer.config.backend_kinds import BACKENDS, KINDS, BackendKind
from rollgym.trainer.core.strict import Amount, Seconds, Settings


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

    kind: Annotated[str, KINDS] = Field(
        "torch",
        description="torch: in the run's own process. Several ranks: fsdp2 (torch's own sharding), deepspeed (ZeRO; "
        "the extra [deepspeed]), or megatron (Megatron-Core on GPUs; the extra [megatron]).",
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
        "machines share, in place of gathering all of it in the run's process. Any number of ranks goes on with either "
        "kind.",
    )
    timeout_s: Seconds = Field(
        1800.0,
        description="How long a rank waits for the others in one exchange; a rank that dies is noticed at once.",
    )

    @property
    def what(self) -> BackendKind:
        """What is to be known of its kind."""
        return KINDS[self.kind]

    @property
    def data(self) -> int:
        """Number of ranks that share the batch (data parallel)."""
        return self.mesh.data or max(1, self.ranks // self.mesh.model_ranks)

    @model_validator(mode="after")
    def _ranks_are_the_mesh(self) -> Self:
        if self.kind == "torch":
            if odd := self.changed(*sorted(set(type(self).model_fields) - {"kind"})):
                raise ValueError(
                    f"{', '.join(odd)}: kind 'torch' computes in the run's own process and reads none of it: set kind "
                    "to fsdp2 or deepspeed, or leave it out"
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
        for name in ("zero_stage", "sequence_parallel", "cpu_offload"):
            if name not in self.what.reads and self.changed(name):
                kinds = [each.name for each in BACKENDS if name in each.reads]
                named = " and ".join(f"'{kind}'" for kind in kinds)
                word = "kind" if len(kinds) == 1 else "kinds"
                raise ValueError(f"{name} is read by {word} {named} only, not by '{self.kind}': leave it out")
        return self
