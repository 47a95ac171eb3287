"""The group of ranks that compute one model together: each rank's part, its device, and the sums over ranks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from rollgym.trainer.backends.batching import Plans
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class MeshShape:
    """How ranks share the work.

    Ranks are numbered with those that exchange most next to each other: those of a layer's parts first, then those of a
    row's parts, of the batch's parts, and of the stages.

    Attributes:
        data: Parts of the batch.
        tensor: Parts of each layer's weights.
        pipeline: Stages: parts of the layers, one after the other.
        context: Parts of each row.
        expert: Parts of the experts of a layer, over the ranks of `data`: it adds none.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """Number of ranks: the product of all dimensions."""
        return self.data * self.tensor * self.pipeline * self.context

    def data_rank(self, rank: int) -> int:
        """Which part of the batch a rank computes."""
        return rank // (self.tensor * self.context) % self.data

    def stage(self, rank: int) -> int:
        """Which of the stages a rank computes."""
        return rank // (self.tensor * self.context * self.data)

    def speaks(self, rank: int) -> bool:
        """Whether a rank's answers are those of its part of the batch: one of the ranks that compute the same.

        It is one of the last stage, where what is read off the model is computed.
        """
        return rank % (self.tensor * self.context) == 0 and self.stage(rank) == self.pipeline - 1

    @property
    def dimensions(self) -> dict[str, int]:
        """What ranks are numbered by, the slowest first; those that only one kind of backend has only if they count."""
        rare = {"pipeline": self.pipeline, "context": self.context}
        sizes = {"pipeline": self.pipeline, "data": self.data, "context": self.context, "tensor": self.tensor}
        return {name: size for name, size in sizes.items() if rare.get(name) != 1}


def listen(host: str, world_size: int) -> tuple[Any, str]:
    """Open the store where ranks meet, on a free port of `host`, and return it with its address."""
    store = dist.TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store, f"{host}:{store.port}"


class RankGroup:
    """One rank's view of its group.

    Args:
        rank: Its number.
        local_rank: Its number among those of its machine, which is that of its accelerator.
        mesh: How ranks share the work.
        device: Type of device, or `auto`.
        address: Where ranks meet.
        store: The store that listens there, in the rank that opened it.
        timeout_s: How long a rank waits for the others in one exchange.

    Attributes:
        timeout: The same; what is changed holds once `bound_waits` was called.
        plans: Of rows that several of its models compute.

    Raises:
        ConfigError: If the machine does not have the device.
    """

    def __init__(
        self,
        rank: int,
        local_rank: int,
        mesh: MeshShape,
        device: str,
        address: str,
        store: Any,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.shape = mesh
        self.device = _device_of(device, local_rank)
        timeout = timedelta(seconds=timeout_s)
        if store is None:
            host, _, port = address.rpartition(":")
            store = dist.TCPStore(host, int(port), mesh.size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
        dist.init_process_group(
            _communication(self.device),
            store=store,
            rank=rank,
            world_size=mesh.size,
            timeout=timeout,
        )
        dimensions = mesh.dimensions
        self.mesh: DeviceMesh = init_device_mesh(
            self.device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions)
        )
        self.timeout = timeout
        self.plans = Plans()
        self.bound_waits()

    def bound_waits(self) -> None:
        """Set the time-out of all process groups, those made by libraries included.

        A mesh's groups, and those that Megatron and DeepSpeed make, begin with torch's default time-out.
        """
        for group in dist.distributed_c10d._world.pg_map:
            _set_pg_timeout(self.timeout, group)

    @property
    def data(self) -> DeviceMesh:
        """The ranks that compute other parts of the batch with the same part of the weights."""
        return self.mesh["data"]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that compute the same part of the batch with other parts of the weights."""
        return self.mesh["tensor"]

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        shared = torch.tensor(number, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return int(shared)

    def all_true(self, flag: Tensor) -> bool:
        """Return whether a flag is true in all ranks."""
        shared = flag.to(torch.int32)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return bool(shared)

    def all_true_each(self, flags: Sequence[Tensor]) -> list[bool]:
        """Return of each flag whether it is true in all ranks; they all have as many."""
        if not flags:
            return []
        shared = torch.stack([flag.to(self.device) for flag in flags]).to(torch.int32)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return [bool(flag) for flag in shared.tolist()]

    def from_first(self, tensor: Tensor) -> Tensor:
        """Return the first rank's tensor; in the others, the given one has its shape and type."""
        dist.broadcast(tensor, 0)
        return tensor

    def objects_from_first(self, contents: Iterable[Any]) -> list[Any]:
        """Return the first rank's objects; the others give as many."""
        shared = list(contents)
        dist.broadcast_object_list(shared, 0, device=self.device)
        return shared


def _device_of(name: str, local_rank: int) -> torch.device:
    kind = torch_device(name).type
    if kind == "cpu":
        return torch.device("cpu")
    if local_rank >= (there := torch.accelerator.device_count()):
        raise ConfigError(
            f"backend.ranks: rank {local_rank} of this machine has no device; there are {there} of type {kind}: lower "
            "backend.ranks, or set model.device=cpu"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(kind, local_rank)


def _communication(device: torch.device) -> str:
    """What ranks talk by: gloo on the processor, and the accelerator's own beside it."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
