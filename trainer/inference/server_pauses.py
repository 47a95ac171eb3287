"""Pause, sleep and resume of one server, and the replies in flight meanwhile."""

import asyncio
from collections.abc import Sequence

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import PauseMode
from rollgym.trainer.inference.dialect import MemoryTag
from rollgym.trainer.inference.errors import WeightUpdateError, words_of
from rollgym.trainer.inference.server_link import ServerLink
from rollgym.trainer.inference.server_weights import ServedWeights
from rollgym.trainer.inference.under_way import UnderWay


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

    def __init__(self, link: ServerLink, under_way: UnderWay, weights: ServedWeights) -> None:
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
