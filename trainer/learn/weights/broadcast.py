"""Weights from device to device: announced over HTTP, carried by a group in which the trainer is rank 0.

Each server has a group of its own, so one that dies in the middle of an update takes no other server with it. A
broadcast in flight would wait for it: with NCCL, on the trainer's device, without end. So the group is aborted as soon
as the update is given up, after an error of the server's HTTP or the time limit of an update. The next update of that
server meets in a new group.

The trainer holds one bucket of tensors beside its weights.
"""

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from rollgym.extras import install_line
from rollgym.trainer.config.inference import SERVERS, ServerName
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import beside_the_loop, load_attribute
from rollgym.trainer.core.ports import free_ports
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.inference.base import WeightSource
from rollgym.trainer.inference.errors import ServerGoneError
from rollgym.trainer.inference.servers.dialect import Bucket, GroupAddress

Collective = Literal["nccl", "gloo"]

_ROOT = 0
# Aborting a communicator takes milliseconds, unless something on the device holds it.
_ABORTED_IN_S = 10.0


class BroadcastGroup(Protocol):
    """Rank 0 of a group whose other ranks are a server's."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all ranks; returns when it may be overwritten."""
        ...

    def abort(self) -> None:
        """End a broadcast that another thread has begun, and the group with it."""
        ...


class TorchGroup:
    """A group of torch's that no other group of this process knows of.

    Args:
        address: Where its ranks meet.
        prefixes: Parts of the store's keys, outermost first: those that the server's side writes under.
        collective: What it broadcasts by.
        timeout_s: How long the others are waited for.
    """

    def __init__(
        self, address: GroupAddress, prefixes: list[str], collective: Collective, timeout_s: float
    ) -> None:
        patience = timedelta(seconds=timeout_s)
        world, port = address.world_size, address.master_port
        store: Any = TCPStore(address.master_address, port, world, is_master=True, timeout=patience)
        for prefix in prefixes:
            store = PrefixStore(prefix, store)
        self._store = store
        self._group: Any
        if collective == "gloo":
            self._group = distributed.ProcessGroupGloo(store, _ROOT, world, patience)
        else:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = patience
            self._group = distributed.ProcessGroupNCCL(store, _ROOT, world, options)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all ranks."""
        options = distributed.BroadcastOptions()
        options.rootRank = _ROOT
        options.rootTensor = 0
        self._group.broadcast([tensor], options).wait()

    def abort(self) -> None:
        """End what waits for other ranks."""
        self._group.abort()


class VllmGroup:
    """The NCCL group of vLLM's own workers, which is none of torch's.

    Args:
        address: Where its ranks meet.
        device: The trainer's accelerator.

    Raises:
        ConfigError: If vLLM is not installed beside the trainer.
    """

    def __init__(self, address: GroupAddress, device: torch.device) -> None:
        try:
            from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise ConfigError(
                "weights.transport broadcast meets vLLM's workers in vLLM's own group, which needs vllm beside the "
                f"trainer: {install_line('vllm')}, or set weights.transport to disk"
            ) from error
        meeting = StatelessProcessGroup.create(
            host=address.master_address, port=address.master_port, rank=_ROOT, world_size=address.world_size
        )
        self._communicator: Any = PyNcclCommunicator(meeting, device=device)
        self._device = device

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor to all ranks."""
        self._communicator.broadcast(tensor, src=_ROOT)
        torch.accelerator.synchronize(self._device)

    def abort(self) -> None:
        """Take the broadcast that waits for other ranks off the device."""
        with torch.accelerator.device_index(self._device.index):
            self._communicator.nccl.ncclCommAbort(self._communicator.comm)


def buckets(
    tensors: Iterator[tuple[str, Tensor]], limit: int
) -> Iterator[tuple[Bucket, list[tuple[str, Tensor]]]]:
    """Cut tensors into buckets of at most `limit` bytes, but for single tensors that are larger; their order stays."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        own = tensor.numel() * tensor.element_size()
        if held and size + own > limit:
            yield announced(held), held
            held, size = [], 0
        held.append((name, tensor))
        size += own
    if held:
        yield announced(held), held


def announced(tensors: list[tuple[str, Tensor]]) -> Bucket:
    """Return the announcement of tensors: names, dtypes and shapes, which a server receives before their data."""
    return Bucket(
        names=[name for name, _ in tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        shapes=[list(tensor.shape) for _, tensor in tensors],
    )


def vllm_group(
    address: GroupAddress, collective: Collective, device: torch.device, timeout_s: float
) -> BroadcastGroup:
    """Meet the ranks of a vLLM."""
    if collective == "nccl":
        return VllmGroup(address, device)
    return TorchGroup(address, ["weight_transfer"], collective, timeout_s)


def sglang_group(
    address: GroupAddress, collective: Collective, device: torch.device, timeout_s: float
) -> BroadcastGroup:
    """Meet the ranks of an SGLang."""
    kind = "cpu" if collective == "gloo" else device.type
    prefixes = [address.group_name, f"{address.group_name}/", f"{kind}/"]
    return TorchGroup(address, prefixes, collective, timeout_s)


JoinGroup = Callable[[GroupAddress, Collective, torch.device, float], BroadcastGroup]
"""Meets a server's ranks at an address, by a collective, from a device, within so many seconds."""


class TensorBroadcast:
    """The trainer's end of one server's group.

    Args:
        dialect: The kind of the server: each meets in a group of its own.
        collective: What broadcasts; "gloo" replaces the accelerator's collective in tests without an accelerator.
        host: This machine as the server reaches it.
        bucket_bytes: Bytes that one announcement names.
        arrange: What stands between the weights and what the server is sent, such as a head of its own.
        device: Where tensors are sent from.
        timeout_s: How long the server's ranks are waited for.

    Raises:
        ConfigError: If NCCL is requested but not available.
    """

    def __init__(
        self,
        dialect: ServerName,
        *,
        collective: Collective,
        host: str,
        bucket_bytes: int,
        device: torch.device,
        arrange: Callable[[Iterator[tuple[str, Tensor]]], Iterator[tuple[str, Tensor]]] = iter,
        timeout_s: float = 300.0,
    ) -> None:
        if collective == "nccl" and not distributed.is_nccl_available():
            raise ConfigError(
                "weights.transport broadcast needs NCCL, and this torch has none: set weights.transport to disk"
            )
        if collective == "nccl" and device.type == "cpu":
            raise ConfigError(
                "weights.transport broadcast sends from an accelerator, and the policy is trained on the CPU: set "
                "weights.transport to disk"
            )
        self._join: JoinGroup = load_attribute(SERVERS[dialect].group)
        self._collective: Collective = collective
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._device = device
        self._arrange = arrange
        self._timeout_s = timeout_s
        self._address: GroupAddress | None = None
        self._group: BroadcastGroup | None = None
        self._held: list[tuple[str, Tensor]] = []

    def address(self, world_size: int) -> GroupAddress:
        """Say where to meet: a new place each time, because a group that broke off may still wait at the old one."""
        (port,) = free_ports("", 1)
        self._address = GroupAddress(
            master_address=self._host,
            master_port=port,
            world_size=1 + world_size,
            rank_offset=1,
            backend=self._collective,
        )
        return self._address

    async def join(self) -> None:
        """Meet the server's ranks.

        Raises:
            ServerGoneError: If they do not come.
        """
        address = self._address
        assert address is not None
        self._group = await self._in_thread("did not come to the group of the weights", self._meet, address)

    def buckets(self, source: WeightSource) -> Iterator[Bucket]:
        """Cut the weights into what one announcement names.

        Raises:
            WeightsReleasedError: If training has resumed: what was sent last may be of another version.
        """
        for bucket, held in buckets(self._arrange(source.tensors()), self._bucket_bytes):
            self._held = held
            yield bucket
            source.require_held()

    async def send(self, bucket: Bucket) -> None:
        """Send the tensors of the bucket that `buckets` gave last.

        If it is cancelled, the group is aborted: what was sent in part can be used for nothing.

        Raises:
            ServerGoneError: If the server's ranks are gone, as far as the collective says so: gloo does.
        """
        held, self._held = self._held, []
        assert [name for name, _ in held] == list(bucket.names)
        group = self._group
        assert group is not None
        sending = asyncio.ensure_future(
            self._in_thread("left the group of the weights", _broadcast, group, held, self._device)
        )
        try:
            await asyncio.shield(sending)
        except asyncio.CancelledError:
            self._group = None
            await run_shielded(_aborted(group, sending))
            raise

    async def leave(self) -> None:
        """Leave the server's group; the next update joins a new one."""
        self._group = None

    def _meet(self, address: GroupAddress) -> BroadcastGroup:
        return self._join(address, self._collective, self._device, self._timeout_s)

    async def _in_thread(self, what: str, call: Callable[..., Any], *arguments: object) -> Any:
        try:
            # A call on a dead peer may block until the group's time-out: the thread is not joined at shutdown.
            return await beside_the_loop(partial(call, *arguments))
        except RuntimeError as error:  # torch's own of all that its groups run into
            raise ServerGoneError(f"the inference server's ranks {what}: {error}") from error


def _broadcast(group: BroadcastGroup, tensors: list[tuple[str, Tensor]], device: torch.device) -> None:
    for _, tensor in tensors:
        group.broadcast(tensor.detach().to(device).contiguous())


async def _aborted(group: BroadcastGroup, sending: "asyncio.Future[Any]") -> None:
    """Abort a group, and wait a moment for the thread that sends: its memory is used until then."""
    aborting = asyncio.ensure_future(beside_the_loop(group.abort))
    done, _ = await asyncio.wait((aborting, sending), timeout=_ABORTED_IN_S)
    for each in done:
        # Retrieve the error, if any: no caller awaits these futures, and asyncio would log it as unhandled.
        each.exception()
