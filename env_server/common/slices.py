"""Slices of the event loop's time: whoever has much to do within the loop lets others have their turn in between."""

import asyncio
from time import perf_counter

SLICE_S = 0.005
"""So long may the work of one client, or of one operation, keep the loop from everybody else."""


class Slices:
    """Lets tasks that work within the loop have their turns one after another, and the loop go on in between.

    Tasks that are ready at the same time all run in one turn of the loop: each for a few milliseconds is seconds for
    everybody else where there are a thousand of them.
    """

    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        self._end = 0.0

    async def turn(self) -> None:
        """Wait until it is one's turn to work without an await."""
        async with self._one_at_a_time:
            if perf_counter() >= self._end:
                await asyncio.sleep(0)
                self._end = perf_counter() + SLICE_S
