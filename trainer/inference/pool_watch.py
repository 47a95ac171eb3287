"""Monitors the servers of a pool: connects to those that are named, and retries those that are down."""

import asyncio
from contextlib import suppress

from rollgym.trainer.core.errors import RunError, TrainerError
from rollgym.trainer.inference.attendance import Attendance
from rollgym.trainer.inference.base import InferenceHealth
from rollgym.trainer.inference.calls import all_or_cancel
from rollgym.trainer.inference.errors import GONE, words_of
from rollgym.trainer.inference.members import Member, Roster
from rollgym.trainer.inference.pool_weights import PoolWeights

_MISSES = 3
"""Looks in a row at which a server that serves is not well: then it is gone."""


class PoolWatch:
    """Monitors the servers of a pool, and brings back those that were lost.

    Args:
        attendance: The servers.
        weights: Brings those that are back up to date.
        look_every_s: How often servers that are gone are looked for, and others asked how they are.
        roster: Says which servers there are to be; without it they stay the same.
    """

    def __init__(
        self, attendance: Attendance, weights: PoolWeights, look_every_s: float, roster: Roster | None
    ) -> None:
        self._attendance = attendance
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
        deadline = asyncio.get_running_loop().time() + self._attendance.patience_s
        told = False
        while True:
            await self.muster()
            await all_or_cancel([self._connect(member) for member in self._attendance])
            away = [each for each in self._attendance if not each.connected]
            if away and not told:
                told = True
                self._attendance.tell_of_absent()
            if len(away) < len(self._attendance):
                break
            if asyncio.get_running_loop().time() >= deadline:
                raise self._attendance.no_server()
            await asyncio.sleep(min(1.0, self._look_every_s))
        self._watch = asyncio.get_running_loop().create_task(self._look_after())
        self._watch.add_done_callback(self._watch_ended)

    async def end(self) -> None:
        """Look no more, and stop talking to the servers."""
        watching = [*([] if self._watch is None else [self._watch]), *self._looks.values()]
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        for member in self._attendance:
            member.serving = False
            await member.client.close()
        await asyncio.gather(*self._partings)

    async def muster(self) -> None:
        """Remove servers that the roster no longer names, and have new ones inspected soon."""
        if self._roster is None:
            return
        async with self._mustering:
            names = await self._roster.names()
            for member in [each for each in self._attendance if each.name not in names]:
                self._attendance.remove(member)
                self._partings.append(asyncio.get_running_loop().create_task(self._part(member)))
            known = {member.name for member in self._attendance}
            for name in names:
                if name not in known:
                    self._attendance.add(name, self._roster.meet(name))
                    self._look_now.set()

    async def _part(self, member: Member) -> None:
        """Leave a server when the update that is under way there has ended; one that does not is broken off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._attendance.patience_s), member.syncing:
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
            for member in self._attendance:
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
            self._attendance.fail(failure)

    async def _look_at(self, member: Member) -> None:
        if member.syncing.locked() or member.asleep:
            return  # to meet one that sleeps is to generate on memory that it has given back
        if member.serving:
            if self._attendance.paused is not None:
                return  # it says that it does not answer, as it should not
            health = await self._health(member)
            member.misses = 0 if health.ready else member.misses + 1
            if member.misses == _MISSES:  # a busy one may be late now and then
                self._attendance.lost(member, ConnectionError(health.detail))
            return
        try:
            await self._bring_back(member)
        except TrainerError as error:
            self._attendance.put_off(member, error)

    async def _bring_back(self, member: Member) -> None:
        if not member.connected:
            if not await self._connect(member):
                return
            self._attendance.change()
        await self._weights.bring_back(member)

    async def _connect(self, member: Member) -> bool:
        """Meet a server, and return whether it is there."""
        try:
            await member.client.connect()
        except GONE as error:
            self._attendance.lost(member, error)
            return False
        self._attendance.met(member)
        return True

    async def _health(self, member: Member) -> InferenceHealth:
        try:
            return await member.client.health()
        except GONE as error:
            return InferenceHealth(False, words_of(error))
