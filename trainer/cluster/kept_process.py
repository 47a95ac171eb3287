"""A process of a role that is restarted automatically if it dies, while all other roles continue."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rollgym.trainer.backends.transport import pack, unpack
from rollgym.trainer.cluster.process import RoleProcess
from rollgym.trainer.cluster.supervision import RoleRestarts
from rollgym.trainer.core.errors import ConfigError, RoleDiedError, RoleLostError, RunError

Lost = Callable[[Exception], None]
"""Called in the event loop with the reason why a process cannot be restarted."""


class KeptProcess:
    """Holds a process, and restarts it whenever it dies.

    Args:
        role: The role's name.
        start: Starts a process that accepts calls.
        restarts: Says how long to wait before a restart, and when there were too many.
        lost: Notified when no restart is possible: the process died too often, or its machine has failed.
        say: Receives messages for people about deaths and restarts.

    Attributes:
        bring: Brings a restarted process to its predecessor's state, before it receives any other call.
    """

    def __init__(
        self,
        role: str,
        start: Callable[[], Awaitable[RoleProcess]],
        restarts: RoleRestarts,
        lost: Lost,
        say: Callable[[str], None],
    ) -> None:
        self.bring: Callable[[RoleProcess], Awaitable[None]] | None = None
        self._role = role
        self._start = start
        self._restarts = restarts
        self._lost = lost
        self._say = say
        self._process: RoleProcess | None = None
        self._restarting: asyncio.Task[None] | None = None

    @property
    def there(self) -> bool:
        """Whether the process is alive and accepts calls."""
        return self._process is not None and self._restarting is None

    async def open(self) -> None:
        """Start it for the first time.

        Raises:
            RoleDiedError: If it ends before it takes calls.
        """
        self._take(await self._start())

    async def living(self) -> RoleProcess:
        """Return the process, as soon as there is one.

        Raises:
            RoleLostError: If it died too often.
            RoleDiedError: If its machine has failed.
            RunError: If it was ended.
        """
        while self._restarting is not None:
            await asyncio.shield(self._restarting)
        if self._process is None:
            raise RunError(f"{self._role} has ended with the run")
        return self._process

    async def call(self, method: str, *arguments: Any) -> Any:
        """Send a call to the present process, and return its answer.

        Raises:
            RoleDiedError: If the process has died.
            TrainerError: The error that the call raised in the process.
        """
        process = await self.living()
        return await self.answer(process, pack((method, arguments)))

    async def answer(self, process: RoleProcess, data: bytes) -> Any:
        """Send a pickled call to the process, and return its answer; if the process has died, restart it.

        Raises:
            RoleDiedError: If the process has died.
            TrainerError: The error that the call raised in the process.
        """
        try:
            done, content = unpack(await asyncio.wrap_future(process.call(data)))
        except RoleDiedError as died:
            self.died(process, died)
            raise
        if not done:
            raise content
        return content

    def died(self, process: RoleProcess, died: RoleDiedError) -> None:
        """Restart a dead process; a second notification of the same death is ignored."""
        if process is not self._process or self._restarting is not None:
            return
        self._restarting = asyncio.ensure_future(self._restarted(died))
        # A waiting call receives the failure; if there is none, `lost` has received it.
        self._restarting.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def leave(self) -> RoleProcess | None:
        """Start nothing again, and give the process away, if there is one."""
        process, self._process = self._process, None
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
            self._restarting = None
        return process

    async def end(self) -> None:
        """Start nothing again, and end the process."""
        if (process := await self.leave()) is not None:
            await asyncio.to_thread(process.end)

    def _take(self, process: RoleProcess) -> None:
        self._process = process
        loop = asyncio.get_running_loop()

        def tell(died: RoleDiedError) -> None:
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self.died, process, died)

        process.on_death(tell)

    async def _restarted(self, died: RoleDiedError) -> None:
        try:
            while True:
                if died.with_its_node:
                    raise died  # the whole run must find room for it elsewhere
                wait_s = self._restarts.wait_s(died)
                count = f"{self._restarts.in_a_row(self._role)} of {self._restarts.limit}"
                self._say(f"{died}")
                self._say(f"{self._role} is started again in {wait_s:g} s ({count})")
                if self._process is not None:
                    await asyncio.to_thread(self._process.end)  # one that only cannot be reached may live
                await asyncio.sleep(wait_s)
                try:
                    process = await self._started_as_before()
                    break
                except RoleDiedError as again:
                    died = again
                except (RunError, ConfigError) as error:
                    died = RoleDiedError(self._role, str(error))
            self._take(process)
            self._restarting = None
            self._say(f"{self._role} is back")
        except (RoleLostError, RoleDiedError) as error:
            self._lost(error)
            raise

    async def _started_as_before(self) -> RoleProcess:
        process = await self._start()
        if self.bring is not None:
            try:
                await self.bring(process)
            except BaseException:
                await asyncio.to_thread(process.end)
                raise
        return process
