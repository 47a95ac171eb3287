"""The trainer's end of the double's groups: tensors over gloo, for the tests of clients."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollgym.trainer.inference.servers.dialect import Bucket, GroupAddress
from tests.support.inference_server.weights import BroadcastGroup, sglang_prefixes, vllm_prefixes


class GlooCarrier:
    """Sends tensors to doubles.

    Args:
        dialect: Whose way of sending: vLLM's packs or single tensors, SGLang's flattened buckets.
        per_bucket: Tensors in each bucket.
        packed: vLLM: whether tensors travel in packs of `buffer_bytes`.
    """

    def __init__(
        self, dialect: str, per_bucket: int = 2, *, packed: bool = True, buffer_bytes: int = 64
    ) -> None:
        self._dialect = dialect
        self._per_bucket = per_bucket
        self._packed = packed
        self._buffer_bytes = buffer_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carrier")
        self._tensors: list[Any] = []
        self._address: GroupAddress | None = None
        self._group: BroadcastGroup | None = None
        self.joined = 0

    def address(self, world_size: int) -> GroupAddress:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = {"packed": self._packed, "packed_buffer_size_bytes": self._buffer_bytes}
        self._address = GroupAddress(
            "127.0.0.1",
            port,
            1 + world_size,
            backend="gloo",
            options=options if self._dialect == "vllm" else {},
        )
        return self._address

    async def join(self) -> None:
        address = self._address
        assert address is not None
        prefixes = vllm_prefixes() if self._dialect == "vllm" else sglang_prefixes(address.group_name)
        self._group = await asyncio.get_running_loop().run_in_executor(
            self._thread, BroadcastGroup, "127.0.0.1", address.master_port, 0, address.world_size, prefixes
        )
        self.joined += 1

    def buckets(self, source: Any) -> Iterator[Bucket]:
        named = list(source.tensors())
        for start in range(0, len(named), self._per_bucket):
            part = named[start : start + self._per_bucket]
            self._tensors = [tensor for _, tensor in part]
            yield Bucket(
                [name for name, _ in part],
                [str(tensor.dtype).removeprefix("torch.") for _, tensor in part],
                [list(tensor.shape) for _, tensor in part],
                flattened=self._dialect == "sglang" and self._packed,
            )

    async def send(self, bucket: Bucket) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, list(self._tensors))

    def _send(self, tensors: Sequence[Any]) -> None:
        assert self._group is not None
        for pack in self._packs(tensors):
            self._group.broadcast(pack)

    def _packs(self, tensors: Sequence[Any]) -> Iterator[Any]:
        import torch

        if not self._packed:
            yield from (tensor.detach().contiguous() for tensor in tensors)
            return
        pack: list[Any] = []
        for tensor in tensors:
            pack.append(tensor.detach().contiguous().flatten().view(torch.uint8))
            full = sum(part.numel() for part in pack) > self._buffer_bytes
            if self._dialect == "vllm" and full:
                yield torch.cat(pack)
                pack = []
        if pack:
            yield torch.cat(pack)

    async def leave(self) -> None:
        self._group = None
