"""How long something is waited for, without the time in which those who work at it stood in line for a processor.

On a machine that is busy with other things a server may get a tenth of a processor, and takes ten times as long. What
hangs stands in no line, so it is found out as soon as on a machine of its own.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from rollgym.clients.measuring.metrics import queued_seconds

_Result = TypeVar("_Result")


class Queued:
    """How long this thread and the main threads of processes stand in line for a processor, from when it is made.

    Of a process that ends meanwhile it counts what was known of it when it was looked at last.

    Args:
        pids: The processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._before = {pid: queued_seconds(pid) or 0.0 for pid in (None, *pids)}
        self._now = dict(self._before)

    @property
    def seconds(self) -> float:
        """How long, together."""
        for pid in self._now:
            self._now[pid] = queued_seconds(pid) or self._now[pid]
        return sum(self._now.values()) - sum(self._before.values())


class Patience:
    """So much time, from when it is made.

    Args:
        seconds: How much.
        pids: The processes that work at it, beside this one.
    """

    def __init__(self, seconds: float, pids: Sequence[int]) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._queued = Queued(pids)

    @property
    def left_s(self) -> float:
        """How much of it is left at least."""
        waited = self._loop.time() - self._began - self._queued.seconds
        return self._seconds - waited

    async def wait_for(self, awaited: Awaitable[_Result]) -> _Result:
        """Wait for something, and cancel it where no time is left.

        Raises:
            TimeoutError: No time is left.
        """
        task = asyncio.ensure_future(awaited)
        try:
            while not task.done():
                if (left := self.left_s) <= 0:
                    raise TimeoutError
                await asyncio.wait((task,), timeout=left)
            return task.result()
        finally:
            task.cancel()
