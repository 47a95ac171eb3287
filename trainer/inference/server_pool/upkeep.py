"""Keeps the servers of a pool in use: sends them the weights, connects to new ones, retries those that are down."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollgym.trainer.core.errors import RunError, TrainerError
from rollgym.trainer.inference.base import InferenceClient, InferenceHealth, WeightSource
from rollgym.trainer.inference.calls import all_or_cancel
from rollgym.trainer.inference.errors import (
    GONE,
    BroadcastGroupError,
    InferenceError,
    ServerGoneError,
    WeightsReleasedError,
    WeightUpdateError,
    WrongWeightsError,
    words_of,
)
from rollgym.trainer.inference.server_pool.members import Member, PoolHealth, ServerRoster

Check = Callable[[str, InferenceClient], Awaitable[object]]
"""Looks whether a server has the weights that it was sent; raises `RunError` if not."""


class PoolWeights:
    """Sends weights to the servers of a pool, and verifies them on each.

    Args:
        servers: The servers.
        check: Looks whether a server has the weights that it was sent.
        attempts: Updates of one server before its wrong weights are an error.
        update_timeout_s: How long one server may take for an update and its verification; then it counts as lost, and
            the others continue.
        say: Called with a message when a server is sent its weights again.
    """

    def __init__(
        self,
        servers: PoolHealth,
        check: Check | None,
        *,
        attempts: int,
        update_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._servers = servers
        self._check = check
        self._attempts = attempts
        self._update_timeout_s = update_timeout_s
        self._say = say
        self._source: WeightSource | None = None

    async def sync(self, source: WeightSource, version: int) -> None:
        """Bring new weights to all servers that answer, and have each verified; the others get them when they are back.

        Raises:
            NoServerError: If none answers for too long.
            SharedServerError: If another run takes the servers away.
            RunError: If one that has served answers with other weights than it was sent, however often.
        """
        self._source, self._servers.version = source, version
        for member in self._servers:
            if member.asleep:
                member.missed()  # no look has met it
        deadline: float | None = None
        while True:
            self._servers.raise_if_failed()
            # One that was gone may be back while the others take the weights, or fail to.
            since = self._servers.changes
            known = [member for member in self._servers if member.waited_for]
            if any(await all_or_cancel([self._bring_along(member) for member in known])):
                return
            if deadline is None:  # an update may take longer than servers that are gone are waited for
                deadline = asyncio.get_running_loop().time() + self._servers.patience_s
            await self._servers.until_changed(deadline, since)

    async def bring_back(self, member: Member) -> None:
        """Bring the current weights to a server that was gone, if there are any and it has not failed to take them."""
        if self._source is None or member.waits_beyond == self._servers.version:
            return
        try:
            await self._bring_up_to_date(member)
        except WeightsReleasedError:
            member.missed()
            raise

    async def _bring_along(self, member: Member) -> bool:
        """Bring the current weights to one server of several; the run continues without one that never served."""
        try:
            return await self._bring_up_to_date(member)
        except TrainerError as error:
            if not (member.is_new or member.let_go.is_set()):
                raise
            self._servers.put_off(member, error, self._servers.version)
            return False

    async def _bring_up_to_date(self, member: Member) -> bool:
        """Bring the current weights to a server, and return whether it has them; False if it is gone."""
        if not await member.begin_update():
            return False
        try:
            if not await self._take_weights(member):
                return False
        finally:
            member.syncing.release()
        if member.let_go.is_set():
            return False
        if not member.serving:
            # A request may have found it gone while it took the weights: it is there, as it has them.
            self._servers.came(member)
        return True

    async def _take_weights(self, member: Member) -> bool:
        """Have a server take the current weights; `syncing` is held."""
        limit = asyncio.timeout(self._update_timeout_s)
        try:
            async with limit:
                await self._sync(member)
                if not member.serving:
                    await self._stand_as_others(member)
            return True
        except (WeightUpdateError, WrongWeightsError) as error:
            is_there = not member.let_go.is_set() and not isinstance(error.__cause__, ServerGoneError)
            if is_there and not (isinstance(error, BroadcastGroupError) and self._others_serve(member)):
                member.serving = False
                raise  # it is there, and does not take them
            self._servers.lost(member, error)
        except (*GONE, InferenceError) as error:
            if limit.expired():
                member.overran()
            self._servers.lost(member, self._overdue() if limit.expired() else error)
        except RunError:
            member.serving = False  # what it would answer with is undefined
            raise
        if not limit.expired():
            member.asleep = False  # a restarted server is awake, and one that was too late may sleep still
        return False

    def _others_serve(self, member: Member) -> bool:
        return any(each is not member for each in self._servers.serving)

    async def _sync(self, member: Member) -> None:
        assert self._source is not None
        for attempt in range(1, self._attempts + 1):
            try:
                if member.asleep:
                    await member.client.wake(("weights",))
                await member.client.sync(self._source, self._servers.version)
                if member.asleep:
                    # Only now: what it caches is computed by the new weights.
                    await member.client.wake(("kv_cache",))
                    member.asleep = False
                if self._check is not None:
                    await self._check(member.name, member.client)
                return
            except InferenceError as error:
                gone = isinstance(error, ServerGoneError) or isinstance(error.__cause__, ServerGoneError)
                if attempt == self._attempts or gone or member.let_go.is_set():
                    raise
                if not (member.is_new and member.told):
                    self._say(f"{error}; it is sent them again")

    def _overdue(self) -> TimeoutError:
        return TimeoutError(
            f"it has not taken the weights of version {self._servers.version} in {self._update_timeout_s:g} s "
            "(inference.update_timeout_s)"
        )

    async def _stand_as_others(self, member: Member) -> None:
        """Pause or resume a server that is about to serve, as the pool is; the pool's state may change meanwhile."""
        while True:
            paused = self._servers.paused
            await (member.client.resume() if paused is None else member.client.pause(paused))
            if paused == self._servers.paused:
                return


_MISSES = 3
"""Looks in a row at which a server that serves is not well: then it is gone."""


class PoolWatch:
    """Monitors the servers of a pool, and brings back those that were lost.

    Args:
        servers: The servers.
        weights: Brings those that are back up to date.
        look_every_s: How often servers that are gone are looked for, and others asked how they are.
        roster: Says which servers there are to be; without it they stay the same.
    """

    def __init__(
        self, servers: PoolHealth, weights: PoolWeights, look_every_s: float, roster: ServerRoster | None
    ) -> None:
        self._servers = servers
        self._weights = weights
        self._look_every_s = look_every_s
        self._roster = roster
        self._mustering = asyncio.Lock()
        self._look_now = asyncio.Event()
        self._partings: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._looks: dict[Member, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        """Look for the servers until one answers, and look after them from then on.

        Raises:
            NoServerError: If none does in time.
            ConfigError: If one lacks something that the run needs.
        """
        deadline = asyncio.get_running_loop().time() + self._servers.patience_s
        told = False
        while True:
            await self.muster()
            await all_or_cancel([self._connect(member) for member in self._servers])
            away = [each for each in self._servers if not each.connected]
            if away and not told:
                told = True
                self._servers.tell_of_absent()
            if len(away) < len(self._servers):
                break
            if asyncio.get_running_loop().time() >= deadline:
                raise self._servers.no_server()
            await asyncio.sleep(min(1.0, self._look_every_s))
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
        self._watch.add_done_callback(self._watch_ended)

    async def end(self) -> None:
        """Look no more, and stop talking to the servers."""
        watching = [*([] if self._watch is None else [self._watch]), *self._looks.values()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for member in self._servers:
            member.serving = False
            await member.client.close()
        await asyncio.gather(*self._partings)

    async def muster(self) -> None:
        """Remove servers that the roster no longer names, and have new ones inspected soon."""
        if self._roster is None:
            return
        async with self._mustering:
            names = await self._roster.names()
            for member in [each for each in self._servers if each.name not in names]:
                self._servers.remove(member)
                self._partings.append(asyncio.get_running_loop().create_task(self._part(member)))
            known = {member.name for member in self._servers}
            for name in names:
                if name not in known:
                    self._servers.add(name, self._roster.meet(name))
                    self._look_now.set()

    async def _part(self, member: Member) -> None:
        """Leave a server when the update that is under way there has ended; one that does not is broken off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._servers.patience_s), member.syncing:
                pass
        await member.client.close()

    async def _look_after(self) -> None:
        """Look for servers that are gone, and bring those that are back up to date."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_every_s):
                    await self._look_now.wait()
            self._look_now.clear()
            await self.muster()
            for member in self._servers:
                self._begin_look(member)

    def _begin_look(self, member: Member) -> None:
        """Look at a server while others are looked at: to bring one up to date may take long, or never end."""
        if member in self._looks:
            return

        def ended(look: asyncio.Task[None]) -> None:
            del self._looks[member]
            self._watch_ended(look)

        look = self._looks[member] = asyncio.get_running_loop().create_task(self._look_at(member))
        look.add_done_callback(ended)

    def _watch_ended(self, watch: asyncio.Task[None]) -> None:
        """End the run if the watching task has failed: lost servers would never be brought back."""
        if not watch.cancelled() and (error := watch.exception()) is not None:
            failure = RunError(
                f"the inference servers are no longer looked after, because of {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._servers.fail(failure)

    async def _look_at(self, member: Member) -> None:
        if member.syncing.locked() or member.asleep:
            return  # to meet one that sleeps is to generate on memory that it has given back
        if member.serving:
            if self._servers.paused is not None:
                return  # it says that it does not answer, as it should not
            health = await self._health(member)
            member.misses = 0 if health.ready else member.misses + 1
            if member.misses == _MISSES:  # a busy one may be late now and then
                self._servers.lost(member, ConnectionError(health.detail))
            return
        version = self._servers.version
        try:
            await self._bring_back(member)
        except TrainerError as error:
            # Of the version at which it began: a newer one, published meanwhile, has not been tried.
            self._servers.put_off(member, error, version)

    async def _bring_back(self, member: Member) -> None:
        if not member.connected:
            if not await self._connect(member):
                return
            self._servers.change()
        await self._weights.bring_back(member)

    async def _connect(self, member: Member) -> bool:
        """Meet a server, and return whether it is there."""
        try:
            await member.client.connect()
        except GONE as error:
            self._servers.lost(member, error)
            return False
        self._servers.met(member)
        return True

    async def _health(self, member: Member) -> InferenceHealth:
        try:
            return await member.client.health()
        except GONE as error:
            return InferenceHealth(False, words_of(error))
