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
    """Pauses one server and lets it go on.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.
        weights: Those that it has.

    Attributes:
        steering: Held while the server is met, paused, let go on, or given weights.
        mode: How it is paused; None where it is not.
        by_caller: Whether somebody asked for the pause, beside updates.
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
        """Whether it is paused, and was not when it was met: somebody else may need that pause."""
        return self.mode is not None and not self._found

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating; requests that come meanwhile wait here.

        Raises:
            ConfigError: If replies would go on with other weights and the server would not say which token is whose.
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
        """Go on.

        Raises:
            WeightsError: If the weights must be sent first.
        """
        async with self.steering:
            self.by_caller = False
            if self.mode is not None or not self._link.capabilities.tried:
                self._weights.trust()
                await self.end()

    def met(self) -> None:
        """Note that a server was met, perhaps anew; `steering` is held.

        Nobody's wish to have it paused holds any longer, and requests wait for the weights that it is to be given.
        """
        self.by_caller = False
        tried = self._link.capabilities.tried
        self._found = not tried and (self._found or self.mode is None)
        if self.mode is None or not tried:
            return  # it is paused yet, and goes on with its next weights
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
            # A server goes on with a call whose caller has left: it could pause after it was told to go on.
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
        """Let a paused server go on; `steering` is held."""
        try:
            await self._link.converse(self._link.dialect.resume())
            await self._link.try_out()
        except BaseException as error:
            # Whoever is held would wait for ever.
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
        """Take memory again; with its cache it goes on."""
        async with self.steering:
            await self._link.converse(self._link.dialect.wake(tags))
        if "kv_cache" in tags:
            await self.resume()
