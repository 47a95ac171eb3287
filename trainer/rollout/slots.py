"""Which episodes may run at one time: if sessions are costly, a limited number, the oldest group first."""

import asyncio
import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollgym.trainer.tasks.task import Task


class EpisodeSlots:
    """Notified when episodes start and end. This base class lets every episode start at once."""

    def enter(self) -> None:
        """Note that an episode will run."""

    async def start(self, task: Task, member: int) -> None:
        """Wait until the episode may start; it acquires resources, such as a session, only afterwards."""

    def leave(self, task: Task | None) -> None:
        """Note that it ended. `task` is what it started with; None if it was cancelled before it started."""


class Slot:
    """One episode's slot: entered at creation, left exactly once, however the episode ends.

    A task that is cancelled before its first turn runs none of its own code; the holder of the slot then leaves it.

    Args:
        slots: The slots that it counts in.
    """

    def __init__(self, slots: EpisodeSlots) -> None:
        self._slots = slots
        self._task: Task | None = None
        self._left = False
        slots.enter()

    async def start(self, task: Task, member: int) -> None:
        """Wait until the episode may start."""
        await self._slots.start(task, member)
        self._task = task

    def leave(self) -> None:
        """Note that it ended; only the first call counts."""
        if not self._left:
            self._left = True
            self._slots.leave(self._task)


@dataclass(order=True, slots=True)
class _Waiting:
    """One that waits; earlier groups first, then in order of arrival."""

    place: tuple[int, int]
    number: int
    granted: asyncio.Future[None] = field(compare=False)


class BoundedSlots(EpisodeSlots):
    """A limited number of slots for episodes, in total and for each environment.

    An episode that waits for a slot of its environment takes none of those that others could use.

    Args:
        total: Episodes that may run at one time; None for no limit.
        of_environment: The same by environment id, for those that are costlier than others.
    """

    def __init__(self, total: int | None, of_environment: Mapping[str, int] | None = None) -> None:
        self._total = total
        self._of_environment = dict(of_environment or {})
        self._started = 0
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, list[_Waiting]] = {}
        self._numbers = 0

    async def start(self, task: Task, member: int) -> None:
        """Wait for a slot; of those that wait, members of the oldest group start first."""
        env_id = task.env_id
        if self._has_room(env_id) and not self._waiting.get(env_id):
            self._take(env_id)
            return
        self._numbers += 1
        entry = _Waiting((task.index, member), self._numbers, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting.setdefault(env_id, []), entry)
        try:
            await entry.granted
        except asyncio.CancelledError:
            if not entry.granted.cancelled():
                self._free(env_id)  # it was granted at that moment
            raise

    def leave(self, task: Task | None) -> None:
        """Free the slot for a waiting episode."""
        if task is not None:
            self._free(task.env_id)

    def _take(self, env_id: str) -> None:
        self._started += 1
        self._running[env_id] += 1

    def _free(self, env_id: str) -> None:
        self._started -= 1
        self._running[env_id] -= 1
        while (head := self._next_waiting()) is not None:
            key, entry = head
            heapq.heappop(self._waiting[key])
            self._take(key)
            entry.granted.set_result(None)

    def _next_waiting(self) -> tuple[str, _Waiting] | None:
        """Return the oldest of those that could start now."""
        found: tuple[str, _Waiting] | None = None
        for env_id, queue in list(self._waiting.items()):
            while queue and queue[0].granted.done():
                heapq.heappop(queue)
            if not queue:
                del self._waiting[env_id]
            elif self._has_room(env_id) and (found is None or queue[0] < found[1]):
                found = env_id, queue[0]
        return found

    def _has_room(self, env_id: str) -> bool:
        if self._total is not None and self._started >= self._total:
            return False
        limit = self._of_environment.get(env_id)
        return limit is None or self._running[env_id] < limit
