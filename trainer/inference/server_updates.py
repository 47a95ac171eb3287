"""Updates of one server's weights: by a folder that it reads, by a group of ranks, or by an adapter alone."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rollgym.trainer.core.ending import to_its_end
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import AdapterSource, PauseMode, WeightSource
from rollgym.trainer.inference.dialect import Bucket, GroupAddress
from rollgym.trainer.inference.errors import InferenceError, RequestRefusedError, WeightUpdateError, words_of
from rollgym.trainer.inference.server_link import ServerLink
from rollgym.trainer.inference.server_pauses import ServerPauses
from rollgym.trainer.inference.server_weights import ServedAdapters, ServedWeights
from rollgym.trainer.inference.under_way import UnderWay


class TensorCarrier(Protocol):
    """The trainer's end of a group that carries tensors to a server's ranks, outside of HTTP.

    Whatever it sends is announced over HTTP at the same time, bucket by bucket and in order.
    """

    def address(self, world_size: int) -> GroupAddress:
        """Say where to meet, for a server with that many ranks."""
        ...

    async def join(self) -> None:
        """Join the group with the server, which is asked over HTTP to join at the same time."""
        ...

    def buckets(self, source: WeightSource) -> Iterator[Bucket]:
        """Cut the weights into what one announcement names."""
        ...

    async def send(self, bucket: Bucket) -> None:
        """Send the tensors of the bucket that `buckets` gave last."""
        ...

    async def leave(self) -> None:
        """Leave the group; no effect without one."""
        ...


class WeightUpdates:
    """Brings weights to one server.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.
        weights: Account of what it has.
        adapters: Account of its adapters.
        pauses: Pauses it.
        carrier: Carries tensors, where `sync` broadcasts.
    """

    def __init__(
        self,
        link: ServerLink,
        under_way: UnderWay,
        weights: ServedWeights,
        adapters: ServedAdapters,
        pauses: ServerPauses,
        carrier: TensorCarrier | None,
    ) -> None:
        self._link = link
        self._under_way = under_way
        self._weights = weights
        self._adapters = adapters
        self._pauses = pauses
        self._carrier = carrier

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring new weights to the server in the configured way.

        Raises:
            WeightUpdateError: If it failed.
            ConfigError: If no way is configured, or the source has no adapter.
        """
        way = self._link.need.way
        if way == "adapter":
            if not isinstance(source, AdapterSource):
                raise ConfigError("adapters are served alone, and this policy has none: set model.lora")
            await self.take_adapter(str(await source.adapter_folder()), version)
        elif way == "disk":
            await self.take_folder(str(await source.folder()), version)
        elif way == "broadcast" and self._carrier is not None:
            await self._broadcast(self._carrier, source, version)
        else:
            raise ConfigError(f"{self._link.url} was not told how new weights reach it")

    async def _broadcast(self, carrier: TensorCarrier, source: WeightSource, version: int) -> None:
        if self._weights.group is None:
            await carrier.leave()
            address = carrier.address(self._link.capabilities.world_size)
            await _together(self.join_group(address), carrier.join())
        async with self.updating(version):
            # Weights that are divided over ranks are gathered for each bucket, which takes its time. An update that is
            # given up meanwhile waits for that: the ranks gather one thing after another.
            buckets = carrier.buckets(source)
            while (bucket := await to_its_end(asyncio.to_thread(next, buckets, None))) is not None:
                await _together(self.announce(bucket), carrier.send(bucket))

    async def take_folder(self, folder: str, version: int) -> None:
        """Take weights from a folder that the server can read."""
        async with self._taking(version) as mode:
            await self._link.converse(
                self._link.dialect.load_folder(folder, self._weights.label(version), mode)
            )

    async def take_adapter(self, folder: str, version: int) -> None:
        """Load an adapter from a folder that the server can read, under a new name.

        Replies under way end with the adapter that they began with (pause mode "wait"), or are taken up again with the
        new one ("abort"). The old one is unloaded once no reply uses it any more. The first adapter resumes a server
        that was found paused; if it does not take that adapter, it stays paused.
        """
        async with self._pauses.steering:
            met_paused = not self._link.capabilities.tried
            pauses = self._link.need.mode == "abort" and self._pauses.mode is None and not met_paused
            if pauses:
                await self._pauses.begin("abort")
            try:
                await self._adapters.load(folder, version)
                self._weights.taken_as_adapter(version)
            except InferenceError as error:
                raise WeightUpdateError(
                    f"{self._link.url}: the adapter of version {version} failed: {error}"
                ) from error
            finally:
                if pauses:
                    await self._pauses.end()
            if met_paused and not self._pauses.by_caller:
                await self._pauses.end()
        self._adapters.unload_unused()

    # By a group

    async def join_group(self, address: GroupAddress) -> None:
        """Let the server's ranks join a group; the trainer must join at the same time."""
        await self._link.converse(self._link.dialect.join_group(address))
        self._weights.group = address

    async def leave_group(self) -> None:
        """Let both ends leave it."""
        group, self._weights.group = self._weights.group, None
        try:
            if group is not None:
                await self._link.converse(self._link.dialect.leave_group(group))
        finally:
            if self._carrier is not None:
                await self._carrier.leave()

    @asynccontextmanager
    async def updating(self, version: int) -> AsyncIterator[None]:
        """Hold an update by broadcast open: paused, and closed with `version` at the end of the block."""
        async with self._taking(version) as mode:
            await self._link.converse(self._link.dialect.begin_update())
            try:
                yield
                await self._link.converse(self._link.dialect.end_update(self._weights.label(version), mode))
            except BaseException:
                # A group whose update broke off may still wait for tensors: the next one is a new one.
                self._weights.group = None
                self._link.undo(self._link.dialect.abandon_update())
                raise

    async def announce(self, bucket: Bucket) -> None:
        """Tell the server which tensors the group carries now; returns when it has taken them."""
        if self._weights.group is None:
            raise RuntimeError(f"{self._link.url} has joined no group")
        await self._link.converse(self._link.dialect.update(bucket, self._weights.group))

    @asynccontextmanager
    async def _taking(self, version: int) -> AsyncIterator[PauseMode]:
        """Pause for an update; then resume if it succeeded, else refuse requests until one has succeeded."""
        async with self._pauses.steering:
            await self._link.undone()
            if self._pauses.mode is None:
                await self._pauses.begin(self._link.need.mode)
            mode = self._pauses.mode or self._link.need.mode
            # Before the server can draw with them: a reply may end before this block does.
            self._weights.expect(version)
            try:
                yield mode
            except BaseException as error:
                failure = WeightUpdateError(
                    f"{self._link.url}: the update to version {version} failed: {words_of(error)}"
                    + self._if_of_another_model(error)
                )
                self._weights.distrust(failure)
                if isinstance(error, InferenceError):
                    raise failure from error
                raise
            # One that was not trusted let everybody through, to be refused.
            self._under_way.hold()
            self._weights.taken(version)
            if not self._pauses.by_caller:
                await self._pauses.end()

    def _if_of_another_model(self, error: BaseException) -> str:
        """Say what is wrong most often with a server that refuses the first weights that it gets."""
        if not isinstance(error, RequestRefusedError) or self._weights.sent:
            return ""
        served = self._link.capabilities.model
        return (
            f". Was it started from the run's model? It serves '{served}', and takes weights of the same names and "
            "shapes alone"
        )


async def _together(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run two ends of one exchange; if one fails, the other would wait for ever."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        pending = [task for task in tasks if not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()
