"""Pauses and updates of one server: weights by a folder, by a group of ranks, or by an adapter alone.

What is drawn meanwhile waits, continues or ends, as the pause says.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.inference.base import AdapterSource, PauseMode, WeightSource
from rollgym.trainer.inference.errors import (
    BroadcastGroupError,
    InferenceError,
    RequestRefusedError,
    WeightUpdateError,
    words_of,
)
from rollgym.trainer.inference.server_client.in_flight import InFlightReplies
from rollgym.trainer.inference.server_client.link import ServerLink
from rollgym.trainer.inference.server_client.weights import ServedAdapters, ServedWeights
from rollgym.trainer.inference.servers.dialect import Bucket, GroupAddress, MemoryTag


class ServerPauses:
    """Pauses and resumes one server.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.
        weights: Those that it has.

    Attributes:
        steering: Lock for control calls: held while the server is probed, paused, resumed, or given weights.
        mode: How it is paused; None if it is not.
        by_caller: Whether a caller requested the pause, not only an update.
    """

    def __init__(self, link: ServerLink, under_way: InFlightReplies, weights: ServedWeights) -> None:
        self._link = link
        self._under_way = under_way
        self._weights = weights
        self.steering = asyncio.Lock()
        self.mode: PauseMode | None = None
        self.by_caller = False
        self._found = False

    @property
    def is_ours(self) -> bool:
        """Whether this client paused it; a server that was found paused may belong to another run's update."""
        return self.mode is not None and not self._found

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests that come meanwhile wait here.

        Raises:
            ConfigError: If replies would continue with other weights, and the server does not report which weights drew
                which token.
        """
        capabilities = self._link.capabilities
        if mode in ("keep", "recompute") and not capabilities.spans and self._link.need.way is not None:
            raise ConfigError(
                f"{capabilities.server} does not say which weights drew which token: pause with 'abort' or 'wait'"
            )
        async with self.steering:
            if self.mode is None:
                await self.begin(mode)
            self.by_caller = True

    async def resume(self) -> None:
        """Resume generating.

        Raises:
            WeightsError: If the weights must be sent first.
        """
        async with self.steering:
            self.by_caller = False
            if self.mode is not None or not self._link.capabilities.tried:
                self._weights.trust()
                await self.end()

    def met(self) -> None:
        """Note that a server was probed, possibly after a restart; the caller holds `steering`.

        Earlier requests to pause it are void, and requests wait for the weights that it is to be given.
        """
        self.by_caller = False
        tried = self._link.capabilities.tried
        self._found = not tried and (self._found or self.mode is None)
        if self.mode is None or not tried:
            return  # it is still paused, and its next weights resume it
        self.mode = None
        if self._link.need.way not in ("disk", "broadcast"):
            self._under_way.release()

    async def begin(self, mode: PauseMode) -> None:
        """Pause a server that is not paused; `steering` is held."""
        await self._link.undone()
        self._under_way.hold()
        self.mode = mode
        pausing: asyncio.Task[None] | None = None
        try:
            if mode == "wait" and not self._link.capabilities.drains:
                await self._under_way.idle()
            pausing = asyncio.create_task(self._link.converse(self._link.dialect.pause(mode)))
            # A server completes a call whose client has disconnected: the pause could take effect after the resume.
            await asyncio.shield(pausing)
            if mode in ("abort", "wait"):
                await self._under_way.settle(self._link.http.alive)
        except BaseException:
            self.mode = None
            self._under_way.release()
            if not self._found:
                self._link.undo(self._link.dialect.resume(), after=pausing)
            raise

    async def end(self) -> None:
        """Resume a paused server; the caller holds `steering`."""
        try:
            await self._link.converse(self._link.dialect.resume())
            await self._link.try_out()
        except BaseException as error:
            # Requests that wait for the end of the pause would wait for ever.
            self._weights.distrust(
                WeightUpdateError(f"{self._link.url} did not go on after a pause: {words_of(error)}")
            )
            raise
        self.mode, self._found = None, False
        self._under_way.release()

    async def sleep(self, *, keep_weights: bool) -> None:
        """Give accelerator memory back; requests wait until `wake`. Without its weights it needs an update before."""
        await self.pause("abort")
        async with self.steering:
            await self._link.converse(self._link.dialect.sleep(keep_weights=keep_weights))
            if not keep_weights:
                self._weights.forget()

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Allocate memory again; sampling resumes once the cache is back."""
        async with self.steering:
            await self._link.converse(self._link.dialect.wake(tags))
        if "kv_cache" in tags:
            await self.resume()


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
        under_way: InFlightReplies,
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
        self._had_group = False

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring new weights to the server in the configured way.

        Raises:
            WeightUpdateError: If it failed.
            BroadcastGroupError: If the group of a broadcast cannot be made; no other way is tried.
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
            try:
                await _together(self.join_group(address), carrier.join())
            except InferenceError as error:
                # The server may have come, and the trainer not.
                self._weights.group = None
                raise self._no_group(version, error) from error
            self._had_group = True
        async with self.updating(version):
            # Weights that are divided over ranks are gathered for each bucket, which takes its time. An update that is
            # given up meanwhile waits for that: the ranks gather one thing after another.
            buckets = carrier.buckets(source)
            while (bucket := await run_shielded(asyncio.to_thread(next, buckets, None))) is not None:
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

    def _no_group(self, version: int, error: InferenceError) -> BroadcastGroupError:
        made = "made again" if self._had_group else "made"
        return BroadcastGroupError(
            f"{self._link.url}: the group that carries weights to it cannot be {made}, so it has not got version "
            f"{version}: {words_of(error)}. Start the server anew and continue the run from its last checkpoint "
            "(checkpoint.resume=auto), or set weights.transport to disk, which needs no group"
        )

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
