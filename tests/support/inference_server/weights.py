"""New weights for the double: sessions, and a group over TCP that stands for the accelerator's."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.support.inference_server.engine import Engine
from tests.support.inference_server.models import WeightsError


class SessionError(Exception):
    """A call that the state of the update does not allow."""


@dataclass(frozen=True)
class Bucket:
    """What one call of an update says that the group will carry."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]

    def check(self) -> None:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise SessionError(
                f"lengths differ: {len(self.names)} names, {len(self.dtypes)} dtypes, {len(self.shapes)} shapes"
            )


class BroadcastGroup:
    """One rank of a gloo group that no other group of the process knows of.

    Rank 0 is the trainer and keeps the store. SGLang's prefixes are those of its `init_custom_process_group`, so a
    trainer that joins with that function meets this group; vLLM's are ours, as its own groups need NCCL.
    """

    def __init__(self, address: str, port: int, rank: int, world_size: int, prefixes: Sequence[str]) -> None:
        import torch.distributed as distributed

        patience = timedelta(seconds=20)
        store: Any = distributed.TCPStore(address, port, world_size, is_master=rank == 0, timeout=patience)
        for prefix in prefixes:
            store = distributed.PrefixStore(prefix, store)
        self.rank = rank
        self._store = store
        self._group = distributed.ProcessGroupGloo(store, rank, world_size, patience)

    def broadcast(self, tensor: Any) -> None:
        self._group.broadcast([tensor], _root_options()).wait()


def vllm_prefixes() -> list[str]:
    return ["weight_transfer"]


def sglang_prefixes(group_name: str) -> list[str]:
    return [group_name, f"{group_name}/", "cpu/"]


def _root_options() -> Any:
    import torch.distributed as distributed

    options = distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def digests(tensors: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Return the names of tensors, and a digest of the numbers of each."""
    return [
        (name, hashlib.blake2b(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest())
        for name, tensor in tensors
    ]


def receive(group: BroadcastGroup, bucket: Bucket) -> Iterator[tuple[str, Any]]:
    """One broadcast for each tensor."""
    import torch

    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype))
        group.broadcast(tensor)
        yield name, tensor


def receive_flattened(group: BroadcastGroup, bucket: Bucket) -> Iterator[tuple[str, Any]]:
    """One broadcast for the bytes of all tensors."""
    yield from _receive_pack(group, list(zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True)))


def receive_packed(group: BroadcastGroup, bucket: Bucket, buffer_bytes: int) -> Iterator[tuple[str, Any]]:
    """One broadcast for each pack: tensors are appended until the buffer is passed, the last one included."""
    pack: list[tuple[str, str, Sequence[int]]] = []
    size = 0
    for entry in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        pack.append(entry)
        size += _bytes_of(entry[1], entry[2])
        if size > buffer_bytes:
            yield from _receive_pack(group, pack)
            pack, size = [], 0
    if pack:
        yield from _receive_pack(group, pack)


def _bytes_of(dtype: str, shape: Sequence[int]) -> int:
    import torch

    return int(torch.empty((), dtype=getattr(torch, dtype)).element_size() * torch.Size(shape).numel())


def _receive_pack(
    group: BroadcastGroup, pack: list[tuple[str, str, Sequence[int]]]
) -> Iterator[tuple[str, Any]]:
    import torch

    sizes = [_bytes_of(dtype, shape) for _, dtype, shape in pack]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.broadcast(flat)
    for (name, dtype, shape), part in zip(pack, flat.split(sizes), strict=True):
        # A copy is aligned, whatever stands before it.
        yield name, part.clone().view(getattr(torch, dtype)).reshape(tuple(shape))


class WeightUpdates:
    """The state of an update: the group, the session, and how it may fail.

    Args:
        engine: Whose weights they are.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="double-weights")
        self.groups: dict[str, BroadcastGroup] = {}
        self.options: dict[str, Any] = {}
        self.session = False
        self.broken = False
        self.last: Bucket | None = None
        self.wrong_next = False
        self.fail_next = False
        self.received: list[tuple[str, str]] = []

    async def join(
        self, name: str, address: str, port: int, rank: int, world: int, prefixes: list[str]
    ) -> None:
        if name in self.groups:
            raise SessionError(f"the group {name!r} exists")
        if not 0 < rank < world:
            raise SessionError(f"rank {rank} of {world}")
        loop = asyncio.get_running_loop()
        self.groups[name] = await loop.run_in_executor(
            self._thread, BroadcastGroup, address, port, rank, world, prefixes
        )

    async def take(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """Take what comes over a group, between two steps."""

        def work() -> None:
            arrived = list(tensors)
            if self.fail_next:
                self.fail_next = False
                self._engine.model.load(arrived[: len(arrived) // 2])
                self.broken = True
                raise WeightsError("the worker failed in the middle of the update")
            self._engine.model.load(arrived)
            self.received += digests(arrived)
            self._spoil()

        async def received() -> None:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)

        try:
            await self._engine.alone_async(received)
        except WeightsError:
            self.broken = True
            raise

    async def load_folder(self, folder: str) -> None:
        def work() -> None:
            from safetensors.torch import load_file

            if self.fail_next:
                self.fail_next = False
                raise WeightsError("the worker failed to read the folder")
            path = Path(folder)
            if not path.is_dir():
                raise WeightsError(f"{folder} is not a folder")
            self._engine.model.load_folder(path)
            for file in sorted(path.glob("*.safetensors")):
                self.received += digests(load_file(file).items())
            self._spoil()

        await self._engine.alone(work)

    def _spoil(self) -> None:
        if self.wrong_next:
            self.wrong_next = False
            self._engine.model.spoil()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
