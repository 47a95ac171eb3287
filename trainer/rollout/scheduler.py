"""Plays groups of episodes: one asyncio task an episode, groups admitted by the window, oldest finished first."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trainer.ledger import Ledger
from trainer.records import Group, Outcome, Trajectory
from trainer.rollout.admission import AdmissionWindow
from trainer.tasks.task import Task, TaskSource

PlayEpisode = Callable[[Task, int, int], Awaitable[Trajectory]]
"""Plays (task, member, attempt). Outcomes that are no result are replaced by the scheduler."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a group is played.

    Attributes:
        size: Episodes that a group hands to training.
        extra: Episodes started beyond `size`; when `size` have ended the others are cancelled.
        max_attempts: Attempts at one episode before the whole group is dropped.
        episode_timeout_s: An episode that takes longer is cancelled and played again.
    """

    size: int
    extra: int
    max_attempts: int
    episode_timeout_s: float


class EpisodeSlots:
    """Told when episodes start and end; the deterministic mode counts them to know when a batch is complete."""

    def enter(self) -> None:
        """An episode will run."""

    def leave(self) -> None:
        """It ended."""


class RolloutScheduler:
    """Keeps the window's groups playing and hands finished ones to training.

    Args:
        source: The task stream.
        window: Which groups may run and which finished one comes next.
        play: Plays one episode.
        plan: How a group is played.
        ledger: Told of every task that is issued or dropped.
        slots: Told of every episode's start and end.
        disconnected: Whether an environment server is gone now. Time that episodes wait for it is not theirs.
    """

    def __init__(
        self,
        source: TaskSource,
        window: AdmissionWindow,
        play: PlayEpisode,
        plan: GroupPlan,
        ledger: Ledger,
        slots: EpisodeSlots,
        disconnected: Callable[[], bool] = lambda: False,
    ) -> None:
        self.window = window
        self.counters: Counter[str] = Counter()
        self._source = source
        self._play = play
        self._plan = plan
        self._ledger = ledger
        self._slots = slots
        self._disconnected = disconnected
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: dict[int, Group] = {}
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self._waited_s = 0.0

    def admit(self, version: int) -> None:
        """Start as many groups as the window allows, stamped with the policy version that plays them first."""
        for index in self.window.admit(version):
            self._ledger.issued(index, version)
            for _ in range(self._plan.size + self._plan.extra):
                self._slots.enter()
            task = asyncio.get_running_loop().create_task(self._run_group(index, version))
            self._tasks.add(task)
            task.add_done_callback(self._group_ended)

    async def next_groups(self, version: int) -> list[Group]:
        """Return the groups of the next training step, chosen oldest finished first, in the order of the stream.

        Raises:
            Exception: Whatever a playing group raised that playing again cannot mend.
        """
        self.admit(version)
        groups: list[Group] = []
        started = asyncio.get_running_loop().time()
        while len(groups) < self.window.groups_per_step:
            index = self.window.take(version)
            if index is None:
                self._progress.clear()
                await self._progress.wait()
                if self._failure is not None:
                    raise self._failure
                self.admit(version)
                continue
            groups.append(self._finished.pop(index))
        # Who of them ended first is a matter of time; what is trained on must not be.
        groups.sort(key=lambda group: group.index)
        self._waited_s = asyncio.get_running_loop().time() - started
        return groups

    def release(self, group: Group) -> None:
        """Forget a group that was trained or dropped, so that a new one may start."""
        self.window.release(group.index)

    @property
    def waited_s(self) -> float:
        """Wall-clock seconds that the last `next_groups` waited for episodes."""
        return self._waited_s

    async def close(self) -> None:
        """Cancel everything that still plays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._progress.set()

    async def _run_group(self, index: int, version: int) -> None:
        group = Group(index, self._source.task(index), version)
        members = [
            asyncio.get_running_loop().create_task(self._run_member(group, member))
            for member in range(self._plan.size + self._plan.extra)
        ]
        try:
            for finished in asyncio.as_completed(members):
                trajectory = await finished
                if trajectory is None:
                    self._drop(group)
                    return
                group.trajectories.append(trajectory)
                if len(group.trajectories) == self._plan.size:
                    break
        finally:
            self.counters["episodes_surplus"] += sum(not member.done() for member in members)
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)
        group.trajectories.sort(key=lambda trajectory: trajectory.member)
        self._finished[index] = group
        self.window.finish(index)
        self._progress.set()

    def _drop(self, group: Group) -> None:
        reason = "failed:" + ",".join(sorted(group.failures))
        self._ledger.dropped(group.index, reason)
        self.counters["groups_failed"] += 1
        self.window.release(group.index)
        self._progress.set()

    async def _run_member(self, group: Group, member: int) -> Trajectory | None:
        """Play until there is a result; None when all attempts failed."""
        try:
            for attempt in range(self._plan.max_attempts):
                trajectory = await self._attempt(group.task, member, attempt)
                if trajectory.outcome.is_result:
                    self.counters["episodes_finished"] += 1
                    return trajectory
                outcome = trajectory.outcome.value
                group.failures[outcome] = group.failures.get(outcome, 0) + 1
                self.counters[f"episodes_{outcome}"] += 1
            return None
        finally:
            self._slots.leave()

    async def _attempt(self, task: Task, member: int, attempt: int) -> Trajectory:
        while True:
            try:
                async with asyncio.timeout(self._plan.episode_timeout_s):
                    return await self._play(task, member, attempt)
            except TimeoutError:
                if self._disconnected():
                    continue  # it was not the episode that hung
            hung = Trajectory(task, member, attempt, outcome=Outcome.TIMEOUT)
            hung.detail = f"no end within {self._plan.episode_timeout_s} s"
            return hung
