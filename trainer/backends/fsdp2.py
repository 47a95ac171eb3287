"""Training on several ranks with torch's own sharding: FSDP2, and tensor parallelism if the model has a plan."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.layers import CompiledLayers, bodies_of, compiler_of, layers_of
from rollgym.trainer.backends.optimizer import (
    Applied,
    Schedule,
    by_paths,
    checked_groups,
    make_optimizer,
    path_of,
    place_of,
    plain_state,
    what_broke,
)
from rollgym.trainer.backends.packing import PackingChoice, shell_and_costs
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.sharded import ShardedBackend, ShardedModel
from rollgym.trainer.backends.weight_pieces import DTensorPieces, WholeModel, divided_like, local_of, whole_of
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.models.lora import has_adapters

_PER_HEAD = "replicated_with_grad_allreduce"


def _divide_layers(model: nn.Module, group: RankGroup) -> list[str]:
    """Divide a model's layers over the tensor-parallel ranks.

    Embeddings and the output head stay whole in each of them.

    Args:
        model: A language model, or a critic with one as its body; it is changed in place.
        group: The ranks.

    Returns:
        Names of the weights that each rank holds whole, but uses for its own heads only: their gradients are parts of a
        sum over these ranks.

    Raises:
        ConfigError: If the model has no plan that is known here, or its heads do not divide.
    """
    parts = group.tensor.size()
    if parts == 1:
        return []
    partial: list[str] = []
    for body in bodies_of(model):
        core = body.base_model
        prefix = next(name for name, module in model.named_modules() if module is core)
        plan = layer_plan(body, parts)
        for name, module in core.named_modules():
            style = plan.get(_pattern(name))
            if style == _PER_HEAD:
                partial += [_joined(prefix, name, own) for own, _ in module.named_parameters()]
            elif style is not None:
                parallelize_module(module, group.tensor, _style(style))
    return partial


def layer_plan(body: PreTrainedModel, parts: int) -> Mapping[str, str]:
    """Return how each kind of layer is divided, by names with `*` in place of numbers.

    Args:
        body: A language model.
        parts: Tensor-parallel ranks.

    Raises:
        ConfigError: If it cannot be divided into so many parts by what is known here.
    """
    name = type(body).__name__
    if has_adapters(body):
        raise ConfigError(
            f"backend.mesh.tensor {parts}: adapters (model.lora) are not divided by tensor parallelism here: set "
            "backend.mesh.tensor=1, or train all weights"
        )
    plan = getattr(body.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise ConfigError(
            f"backend.mesh.tensor {parts}: the library has no plan to divide {name}: set backend.mesh.tensor=1"
        )
    if unknown := sorted(set(plan.values()) - {"colwise", "rowwise", _PER_HEAD}):
        raise ConfigError(
            f"backend.mesh.tensor {parts}: the plan of {name} divides layers in a way that is not known here "
            f"({', '.join(unknown)}): set backend.mesh.tensor=1"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = getattr(body.config, key, parts)
        if count % parts:
            raise ConfigError(
                f"backend.mesh.tensor {parts} does not divide {key} {count} of {name}: take a number that does"
            )
    return plan


def _style(name: str) -> ParallelStyle:
    return ColwiseParallel() if name == "colwise" else RowwiseParallel()


def _pattern(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


_TINY = 1e-6
"""Added to the norm that gradients are clipped by, as torch's own clipping has it."""


class Fsdp2Optimizer:
    """Steps pieces of weights by pieces of gradients.

    Args:
        group: The ranks.
        trained: What is trained, by name.
        partial: Names of weights that every rank of a tensor-parallel group holds whole, but reads for its own heads
            only.
        settings: The optimizer's settings and gradient clip.
        rate: Learning rate of the first step.

    Attributes:
        fused: Whether a step is one kernel.
    """

    def __init__(
        self,
        group: RankGroup,
        trained: Mapping[str, Tensor],
        partial: Sequence[str],
        settings: OptimizerSettings,
        rate: float,
    ) -> None:
        self._group = group
        self._names = list(trained)
        self._trained = list(trained.values())
        self._partial = [trained[name] for name in partial if name in trained]
        self._clip = settings.gradient_clip
        self._averages = settings.keeps_averages
        self._optimizer = make_optimizer(settings, self._trained, rate)
        self.fused = bool(self._optimizer.defaults["fused"])
        self._incoming: dict[int, dict[str, Any]] = {}
        self._param_groups: list[dict[str, Any]] = []

    def backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss."""
        # The library averages the ranks' gradients; shares are to be added up.
        (share * self._group.data.size()).backward()

    def apply(self, finite: Tensor, rate: float) -> Applied:
        """Clip the gradients, take the step if all is finite in all ranks, and forget the gradients."""
        self._add_partial_gradients()
        gradients = [each.grad for each in self._trained if each.grad is not None]
        norm = total_norm(gradients, self._group.device)
        taken = self._group.all_true(finite & norm.isfinite())
        if taken:
            scale = torch.clamp(self._clip / (norm + _TINY), max=1.0)
            for gradient in gradients:
                local = local_of(gradient)
                local.mul_(scale.to(local.device))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        broken = "" if taken else self._broken(finite)
        self._optimizer.zero_grad(set_to_none=True)
        return Applied(float(norm), taken, broken)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the state by paths, gathered one at a time."""
        saved = self._optimizer.state_dict()
        whole = (
            (number, key, whole_of(value))
            for number, entries in saved["state"].items()
            for key, value in entries.items()
        )
        return by_paths(whole, saved["param_groups"])

    def pieces(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the state by paths, made if there were none yet."""
        if self._averages:
            for parameter in self._trained:
                entries = self._optimizer.state[parameter]
                if not entries:
                    # Held where torch holds it: a fused step reads it on the device.
                    place = parameter.device if self.fused else torch.device("cpu")
                    entries["step"] = torch.zeros((), device=place)
                    entries["exp_avg"] = torch.zeros_like(parameter)
                    entries["exp_avg_sq"] = torch.zeros_like(parameter)
        saved = self._optimizer.state_dict()["state"]
        return {
            path_of(number, key): value
            for number, entries in saved.items()
            for key, value in entries.items()
            if isinstance(value, Tensor)
        }

    def plain(self) -> dict[str, Any]:
        """Return the parts of the state other than tensors, by paths."""
        return plain_state(self._optimizer.state_dict()["param_groups"], stateless=not self._averages)

    def pieces_read(self) -> None:
        """Nothing: they are what is stepped."""

    def begin_load(self, plain: Mapping[str, Any]) -> None:
        """Load the parts of a state other than tensors.

        Raises:
            ValueError: If it is of another optimizer.
        """
        self._param_groups = checked_groups(plain, len(self._trained))
        self._incoming = defaultdict(dict)

    def take(self, path: str, whole: Tensor) -> None:
        """Take up a tensor of a state that all ranks have whole."""
        number, key = place_of(path)
        parameter = self._trained[number]
        # Averages have the shape of what they are averages of; the count of steps is one number, held as torch does.
        own = whole.cpu() if whole.dim() == 0 else divided_like(parameter, whole)
        self._incoming[number][key] = own

    def end_load(self) -> None:
        """All of it was given."""
        self._optimizer.load_state_dict({"state": dict(self._incoming), "param_groups": self._param_groups})
        self._incoming, self._param_groups = {}, []

    def move(self, parts: Sequence[str], device: torch.device) -> None:
        """Bring the state and the gradients to a device's memory."""
        if "gradients" in parts:
            for parameter in self._trained:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(device)
        if "optimizer" in parts:
            for entries in self._optimizer.state.values():
                for key, value in entries.items():
                    if isinstance(value, Tensor) and value.dim():
                        entries[key] = value.to(device)

    def _broken(self, finite: Tensor) -> str:
        found = [each.grad for each in self._trained]
        yes = torch.ones_like(finite)
        gradients = [yes if each is None else local_of(each).isfinite().all() for each in found]
        return what_broke(self._group, finite, dict(zip(self._names, gradients, strict=True)))

    def _add_partial_gradients(self) -> None:
        """Add up the gradients of weights that a rank holds whole and reads for its own heads only."""
        for parameter in self._partial:
            if parameter.grad is not None:
                dist.all_reduce(local_of(parameter.grad), group=self._group.tensor.get_group())


def fsdp2_model(
    head: Head | None,
    group: RankGroup,
    *,
    dtype: torch.dtype,
    tokens_per_micro_batch: int,
    cpu_offload: bool = False,
    shared_prefixes: Literal["auto", "off"] = "off",
    packed_rows: PackingChoice = "off",
) -> ShardedModel:
    """Return one rank's part of a model that stays as it is.

    Args:
        head: The model, whole, on any device, and what is read off it; the first rank's counts, and it is emptied.
        group: The ranks.
        dtype: Type of numbers that the model computes in, and is in.
        tokens_per_micro_batch: Tokens of a micro-batch, padding included.
        cpu_offload: Whether weights are held in the processor's memory.
        shared_prefixes: `optimizer.shared_prefixes`.
        packed_rows: `optimizer.packed_rows`.
    """
    whole, costs, packs = shell_and_costs(head, group, shared_prefixes, packed_rows, dtype)
    head = whole.shell
    for parameter in head.parameters():
        parameter.requires_grad = False
    _divide_layers(head.model, group)
    shard(whole, group, dtype, cpu_offload=cpu_offload)
    pieces = DTensorPieces(head, dict(head.model.named_parameters()))
    return ShardedModel(
        head,
        group,
        pieces,
        dtype=dtype,
        tokens_per_micro_batch=tokens_per_micro_batch,
        costs=costs,
        packs=packs,
    )


def fsdp2_backend(
    head: Head | None,
    group: RankGroup,
    optimizer: OptimizerSettings,
    schedule: Schedule,
    *,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    compiled: str | None = None,
    cpu_offload: bool = False,
) -> ShardedBackend:
    """Return one rank's part of a model that is trained.

    Weights are held in float32, a piece in each rank. A block's are put together in the type that the model computes in
    when they are needed, and its gradients are added up in float32.

    Args:
        head: The model, whole, on any device, and what is read off it; the first rank's counts, and it is emptied. Its
            trained weights are in float32.
        group: The ranks.
        optimizer: The optimizer's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
        dtype: Type of numbers that the model computes in.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        compiled: What compiles the layers, if anything (`model.compile`).
        cpu_offload: Whether weights, gradients and the optimizer's state are held in the processor's memory.

    Raises:
        ConfigError: If the model cannot be divided as the group wants it.
    """
    whole, costs, packs = shell_and_costs(
        head, group, optimizer.shared_prefixes, optimizer.packed_rows, dtype
    )
    head = whole.shell
    partial = _divide_layers(head.model, group)
    layers = CompiledLayers(head, compiler_of(compiled, group.device))
    shard(whole, group, dtype, cpu_offload=cpu_offload)
    trained = {name: each for name, each in head.model.named_parameters() if each.requires_grad}
    return ShardedBackend(
        head,
        group,
        DTensorPieces(head, trained),
        Fsdp2Optimizer(group, trained, partial, optimizer, schedule.rate(0)),
        schedule,
        dtype=dtype,
        tokens_per_micro_batch=optimizer.micro_batch_tokens,
        gradient_checkpointing=gradient_checkpointing,
        layers=layers,
        costs=costs,
        packs=packs,
    )


def shard(whole: WholeModel, group: RankGroup, dtype: torch.dtype, *, cpu_offload: bool) -> None:
    """Divide a model's weights over the data-parallel ranks, block by block: no more than one is ever whole.

    Args:
        whole: The model and what is read off it; its shell is what is divided.
        group: The ranks.
        dtype: Type of numbers that the model computes in.
        cpu_offload: Whether weights are held in the processor's memory.
    """
    head = whole.shell
    offload = CPUOffloadPolicy(pin_memory=group.device.type != "cpu") if cpu_offload else OffloadPolicy()
    # Where adapters are trained, the weights beside them are held in the type that they are computed in.
    computed = None if dtype == torch.float32 or has_adapters(head.model) else dtype
    precision = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for body in bodies_of(head.model):
        for block in layers_of(body):
            whole.fill(block)
            fully_shard(block, mesh=group.data, mp_policy=precision, offload_policy=offload)
    for module in head.model.children():
        # What was put on top of a body stays in float32, as its numbers are compared.
        if head.model not in bodies_of(head.model) and module not in bodies_of(head.model):
            whole.fill(module)
            fully_shard(module, mesh=group.data, mp_policy=exact, offload_policy=offload)
    whole.fill(head)
    fully_shard(head, mesh=group.data, mp_policy=precision, offload_policy=offload)


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the norm of all gradients together, of which each rank holds a piece; the same number in all ranks.

    Pieces that lie on different meshes are added up apart: torch's own function refuses to mix them.

    Args:
        gradients: DTensors, or tensors that every rank holds whole.
        device: Where the number is wanted.
    """
    sums: dict[Any, Tensor] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else None
        square = local_of(gradient).to(device, torch.float32).square().sum()
        sums[key] = sums[key] + square if key in sums else square
    total = torch.zeros((), device=device)
    for key, square in sums.items():
        if key is not None:
            mesh, placements = key
            for number, placement in enumerate(placements):
                if not isinstance(placement, Replicate):
                    dist.all_reduce(square, group=mesh.get_group(number))
        total = total + square
    return total.sqrt()
