"""Sends the current weights to the servers of a pool: to all when they are new, to one when it is back."""

import asyncio
from collections.abc import Awaitable, Callable

from rollgym.trainer.core.errors import RunError, TrainerError
from rollgym.trainer.inference.attendance import Attendance
from rollgym.trainer.inference.base import InferenceClient, WeightSource
from rollgym.trainer.inference.calls import all_or_cancel
from rollgym.trainer.inference.errors import (
    GONE,
    InferenceError,
    ServerGoneError,
    WeightUpdateError,
    WrongWeightsError,
)
from rollgym.trainer.inference.members import Member

Check = Callable[[str, InferenceClient], Awaitable[object]]
"""Looks whether a server has the weights that it was sent; raises `RunError` if not."""


class PoolWeights:
    """Sends weights to the servers of a pool, and verifies them on each.

    Args:
        attendance: The servers.
        check: Looks whether a server has the weights that it was sent.
        attempts: Updates of one server before its wrong weights are an error.
        update_timeout_s: How long one server may take for an update and its verification; then it counts as lost, and
            the others continue.
        say: Called with a message when a server is sent its weights again.
    """

    def __init__(
        self,
        attendance: Attendance,
        check: Check | None,
        *,
        attempts: int,
        update_timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._attendance = attendance
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
        self._source, self._attendance.version = source, version
        deadline = asyncio.get_running_loop().time() + self._attendance.patience_s
        while True:
            self._attendance.raise_if_failed()
            known = [member for member in self._attendance if member.waited_for]
            if any(await all_or_cancel([self._bring_along(member) for member in known])):
                return
            await self._attendance.until_changed(deadline)

    async def bring_back(self, member: Member) -> None:
        """Bring the current weights to a server that was gone, if there are any and it has not failed to take them."""
        if self._source is None or member.waits_beyond == self._attendance.version:
            return
        await self._bring_up_to_date(member)

    async def _bring_along(self, member: Member) -> bool:
        """Bring the current weights to one server of several; the run continues without one that never served."""
        try:
            return await self._bring_up_to_date(member)
        except TrainerError as error:
            if not (member.is_new or member.let_go.is_set()):
                raise
            self._attendance.put_off(member, error)
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
            self._attendance.came(member)
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
            if not member.let_go.is_set() and not isinstance(error.__cause__, ServerGoneError):
                member.serving = False
                raise  # it is there, and does not take them
            self._attendance.lost(member, error)
        except (*GONE, InferenceError) as error:
            member.overdue = limit.expired()
            self._attendance.lost(member, self._overdue() if member.overdue else error)
        except RunError:
            member.serving = False  # what it would answer with is undefined
            raise
        member.asleep = False  # a restarted server is awake
        return False

    async def _sync(self, member: Member) -> None:
        assert self._source is not None
        for attempt in range(1, self._attempts + 1):
            try:
                if member.asleep:
                    await member.client.wake(("weights",))
                await member.client.sync(self._source, self._attendance.version)
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
            f"it has not taken the weights of version {self._attendance.version} in {self._update_timeout_s:g} s "
            "(inference.update_timeout_s)"
        )

    async def _stand_as_others(self, member: Member) -> None:
        """Pause or resume a server that is about to serve, as the pool is; the pool's state may change meanwhile."""
        while True:
            paused = self._attendance.paused
            await (member.client.resume() if paused is None else member.client.pause(paused))
            if paused == self._attendance.paused:
                return
