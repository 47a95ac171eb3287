"""Those who wait for an answer when a server is to end."""

import asyncio
from collections.abc import Callable
from typing import Any

_LAST_WORDS_S = 1.0


class Unanswered:
    """Tasks that still owe a client an answer: the shutdown of a server waits for them, and cancels late ones.

    Calls that wait for another server have no task; the object that holds them registers a function that answers them
    all.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._give_up: set[Callable[[], None]] = set()
        self._fewer: asyncio.Future[None] | None = None

    def add(self, task: asyncio.Task[Any]) -> None:
        """Note a task that has answered when it ends."""
        self._tasks.add(task)
        task.add_done_callback(self.leave)

    def enter(self) -> asyncio.Task[Any]:
        """Register the current task, which calls `leave` once it has answered; it may then continue with other work."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Note that a task has answered."""
        self._tasks.discard(task)
        if self._fewer is not None and not self._fewer.done():
            self._fewer.set_result(None)

    def attend(self, give_up: Callable[[], None]) -> None:
        """Register a function that answers all calls held for other servers; it runs when the wait for them ends."""
        self._give_up.add(give_up)

    def dismiss(self, give_up: Callable[[], None]) -> None:
        """Unregister a function that `attend` registered."""
        self._give_up.discard(give_up)

    async def settle(self, patience_s: float) -> None:
        """Wait for those that are here now; who has not answered in time is cancelled, and is to say that."""
        waiting = set(self._tasks)
        if not await self._have_left(waiting, patience_s):
            for task in waiting & self._tasks:
                task.cancel()
        others = self._tasks - waiting
        for give_up in list(self._give_up):
            give_up()
        await self._have_left(self._tasks - others, _LAST_WORDS_S)

    async def _have_left(self, waiting: set[asyncio.Task[Any]], patience_s: float) -> bool:
        try:
            async with asyncio.timeout(patience_s):
                while not waiting.isdisjoint(self._tasks):
                    self._fewer = asyncio.get_running_loop().create_future()
                    await self._fewer
        except TimeoutError:
            return False
        return True
