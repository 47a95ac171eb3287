"""How long something is waited for, without the time in which those who work at it stood in line for a processor.

On a machine that is busy with other things a server may get a tenth of a processor, and takes ten times as long. What
hangs stands in no line, so it is found out as soon as on a machine of its own.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from rollgym.clients.measuring.metrics import queued_seconds

_Result = TypeVar("_Result")


class Patience:
    """So much time, from when it is made.

    Args:
        seconds: How much.
        pids: The processes that work at it, beside this one.
    """

    def __init__(self, seconds: float, pids: Sequence[int]) -> None:
        self._seconds = seconds
        self._pids = pids
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._queued = self._queued_s()

    @property
    def left_s(self) -> float:
        """How much of it is left at least."""
        waited = self._loop.time() - self._began - (self._queued_s() - self._queued)
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

    def _queued_s(self) -> float:
        return (queued_seconds() or 0.0) + sum(queued_seconds(pid) or 0.0 for pid in self._pids)
