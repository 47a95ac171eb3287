"""Training on several ranks with torch's own sharding: FSDP2, and tensor parallelism where the model has a plan."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trainer.backends.gradient_checkpointing import bodies_of
from trainer.backends.heads import Head
from trainer.backends.optimizer import Schedule, make_optimizer
from trainer.backends.rank_group import RankGroup
from trainer.backends.sharded import Applied, ShardedBackend
from trainer.backends.tensor_parallel import divide_layers
from trainer.config.run import OptimizerSettings
from trainer.models.lora import has_adapters

_TINY = 1e-6
"""Added to the norm that gradients are clipped by, as torch's own clipping has it."""


class Fsdp2Backend(ShardedBackend):
    """One rank's part of a model that is divided by `fully_shard`.

    Weights are held in float32, a piece in each rank. A block's are put together in the type that the model computes in
    when they are needed, and its gradients are added up in float32.

    Args:
        head: The model, whole, on any device, and what is read off it. Its trained weights are in float32.
        group: The ranks.
        optimizer: The optimizer's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
        dtype: Type of numbers that the model computes in.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        cpu_offload: Whether weights, gradients and the optimizer's state are held in the processor's memory.

    Raises:
        ConfigError: If the model cannot be divided as the group wants it.
    """

    def __init__(
        self,
        head: Head,
        group: RankGroup,
        optimizer: OptimizerSettings,
        schedule: Schedule,
        *,
        dtype: torch.dtype = torch.float32,
        gradient_checkpointing: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        partial = divide_layers(head.model, group)
        shard(head, group, dtype, cpu_offload=cpu_offload)
        super().__init__(
            head,
            group,
            schedule,
            dtype=dtype,
            tokens_per_micro_batch=optimizer.tokens_per_micro_batch,
            gradient_checkpointing=gradient_checkpointing,
        )
        self._settings = optimizer
        self._trained = {name: each for name, each in head.model.named_parameters() if each.requires_grad}
        self._partial = [self._trained[name] for name in partial if name in self._trained]
        self._optimizer = make_optimizer(optimizer, self._trained.values(), schedule.rate(0))
        self._incoming: dict[int, dict[str, Any]] = {}

    def offload(self, parts: Sequence[str]) -> None:
        """Bring what this rank holds to the processor's memory."""
        self._move(parts, torch.device("cpu"))

    def onload(self, parts: Sequence[str]) -> None:
        """Bring it back."""
        self._move(parts, self._group.device)

    def close(self) -> None:
        """Let go of the weights and the optimizer."""
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()
        self._trained, self._partial = {}, []

    def _backward(self, share: Tensor, *, last: bool) -> None:
        # The ranks' gradients are averaged, and are shares of a sum.
        (share * self._group.data.size()).backward()

    def _apply(self, finite: Tensor, rate: float) -> Applied:
        self._add_partial_gradients()
        gradients = [each.grad for each in self._trained.values() if each.grad is not None]
        norm = total_norm(gradients, self._group.device)
        applied = self._group.all_true(finite & norm.isfinite())
        if applied:
            scale = torch.clamp(self._settings.gradient_clip / (norm + _TINY), max=1.0)
            for gradient in gradients:
                local = _local(gradient)
                local.mul_(scale.to(local.device))
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Applied(float(norm), applied)

    def _add_partial_gradients(self) -> None:
        """Add up the gradients of weights that every rank holds whole, but reads for its own heads only."""
        for parameter in self._partial:
            if parameter.grad is not None:
                dist.all_reduce(_local(parameter.grad), group=self._group.tensor.get_group())

    def _gathered(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, parameter in self._trained.items():
            yield name, tuple(parameter.shape)

    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trained.items():
            yield name, self._gathered(parameter.detach())

    def _optimizer_state(self) -> Iterator[tuple[str, Any]]:
        saved = self._optimizer.state_dict()
        for index, entries in saved["state"].items():
            for key, value in entries.items():
                path = f"optimizer\tstate\t#{index}\t{key}"
                yield path, self._gathered(value) if isinstance(value, Tensor) else value
        if not saved["state"]:
            yield "optimizer\tstate", {}
        yield "optimizer\tparam_groups", saved["param_groups"]

    def _begin_optimizer(self, plain: Mapping[str, Any]) -> None:
        self._incoming = defaultdict(dict)
        self._groups = plain["optimizer\tparam_groups"]

    @torch.no_grad()
    def _take(self, path: str, tensor: Tensor) -> None:
        kind, *rest = path.split("\t")
        if kind == "model":
            if rest[0] in self._trained:
                parameter = self._trained[rest[0]]
                _local(parameter).copy_(_local(_divided_like(parameter, tensor)))
            return
        index, key = int(rest[1][1:]), rest[2]
        parameter = list(self._trained.values())[index]
        like = tensor.dim() > 0 and tensor.shape == parameter.shape
        self._incoming[index][key] = _divided_like(parameter, tensor) if like else tensor.cpu()

    def _end_optimizer(self) -> None:
        self._optimizer.load_state_dict({"state": dict(self._incoming), "param_groups": self._groups})
        self._incoming = {}

    def _reading(self) -> AbstractContextManager[object]:
        return _divided_again(self._head)

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        if "parameters" in parts:
            # The library moves the pieces that it gathers from along with the parameters.
            self._head.to(device)
        if "gradients" in parts:
            for parameter in self._trained.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(device)
        if "optimizer" in parts:
            for entries in self._optimizer.state.values():
                for key, value in entries.items():
                    if isinstance(value, Tensor) and value.dim():
                        entries[key] = value.to(device)


def shard(head: Head, group: RankGroup, dtype: torch.dtype, *, cpu_offload: bool) -> None:
    """Divide a model's weights over the data-parallel ranks, block by block.

    Args:
        head: The model and what is read off it; it is changed in place.
        group: The ranks.
        dtype: Type of numbers that the model computes in.
        cpu_offload: Whether weights are held in the processor's memory.
    """
    offload = CPUOffloadPolicy(pin_memory=group.device.type != "cpu") if cpu_offload else OffloadPolicy()
    # Where adapters are trained, the weights beside them are held in the type that they are computed in.
    computed = None if dtype == torch.float32 or has_adapters(head.model) else dtype
    precision = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=torch.float32)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for body in bodies_of(head.model):
        for block in blocks_of(body):
            fully_shard(block, mesh=group.data, mp_policy=precision, offload_policy=offload)
    for module in head.model.children():
        # What was put on top of a body stays in float32, as its numbers are compared.
        if head.model not in bodies_of(head.model) and module not in bodies_of(head.model):
            fully_shard(module, mesh=group.data, mp_policy=whole, offload_policy=offload)
    fully_shard(head, mesh=group.data, mp_policy=precision, offload_policy=offload)


def blocks_of(body: nn.Module) -> list[nn.Module]:
    """Return a language model's layers: what the library says must not be cut in two."""
    names = set(getattr(body, "_no_split_modules", None) or [])
    return [module for module in body.modules() if type(module).__name__ in names]


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
        square = _local(gradient).to(device, torch.float32).square().sum()
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


@contextmanager
def _divided_again(head: Head) -> Iterator[None]:
    """Take the pieces of weights apart again, which a forward without a backward leaves whole."""
    try:
        yield
    finally:
        for module in head.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _divided_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's piece of a tensor that is to be divided as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return whole.to(parameter.device)
    return distribute_tensor(
        whole.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
