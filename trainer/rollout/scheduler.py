"""Plays groups of episodes: one asyncio task an episode, groups admitted by the window, oldest finished first."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trainer.core.errors import RunError
from trainer.records.ledger import Ledger
from trainer.records.trajectory import Group, Outcome, Trajectory
from trainer.rollout.admission import AdmissionWindow
from trainer.tasks.task import Task, TaskSource

_LONGEST_DETAIL = 300
"""Characters of a failure's reason that are kept: it may hold whatever an environment wrote."""

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
        max_failed_groups: Groups of one environment that may be dropped in a row; one more ends the run.
        replace_at_once: Whether a dropped group's place is taken at once, or only when no other group plays any
            more: then it never hangs on time who shares a batch.
    """

    size: int
    extra: int
    max_attempts: int
    episode_timeout_s: float
    max_failed_groups: int = 8
    replace_at_once: bool = True


class EpisodeSlots:
    """Told when episodes start and end; the deterministic mode counts them to know when a batch is complete."""

    def enter(self) -> None:
        """An episode will run."""

    async def start(self) -> None:
        """Wait until it may; those that wait start in the order in which they came."""

    def leave(self, *, started: bool = True) -> None:
        """It ended, or was given up before it started."""


class EnvironmentFailsError(RunError):
    """An environment has failed group after group; the message has its reason."""


class RolloutScheduler:
    """Keeps the window's groups playing and hands finished ones to training.

    Args:
        source: The task stream.
        window: Which groups may run and which finished one comes next.
        play: Plays one episode.
        plan: How a group is played.
        ledger: Told of every task that is issued or dropped.
        slots: Told of every episode's start and end.
        report: Told, for people, why groups were dropped.
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
        report: Callable[[str], None] = lambda _: None,
        disconnected: Callable[[], bool] = lambda: False,
    ) -> None:
        self.window = window
        self.counters: Counter[str] = Counter()
        self._source = source
        self._play = play
        self._plan = plan
        self._ledger = ledger
        self._slots = slots
        self._report = report
        self._disconnected = disconnected
        self._failed_in_a_row: Counter[str] = Counter()
        self._failed_of: Counter[tuple[str, str]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: dict[int, Group] = {}
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self._dropped: list[Group] = []

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
            EnvironmentFailsError: If an environment fails all of its groups.
        """
        self.admit(version)
        groups: list[Group] = []
        while len(groups) < self.window.groups_per_step:
            index = self.window.take(version)
            if index is None:
                await self._something_happens()
                if self._plan.replace_at_once or not self._tasks:
                    self.admit(version)
                continue
            groups.append(self._finished.pop(index))
        # Who of them ended first is a matter of time; what is trained on must not be.
        groups.sort(key=lambda group: group.index)
        return groups

    def release(self, group: Group) -> None:
        """Forget a group that was trained or dropped, so that a new one may start."""
        self.window.release(group.index)

    def take_dropped(self) -> list[Group]:
        """Return the groups that failed since this was last asked, with what their episodes came to."""
        dropped, self._dropped = self._dropped, []
        return dropped

    async def close(self) -> None:
        """Cancel everything that still plays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _something_happens(self) -> None:
        """Wait until a group has ended; one may have failed while nobody waited."""
        if self._failure is None:
            await self._progress.wait()
            self._progress.clear()
        if self._failure is not None:
            raise self._failure

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            # Nobody waits any more after `close`. Anybody else who cancels a group takes its result away.
            self._failure = self._failure or RunError("a group of episodes was cancelled while it played")
        elif task.exception() is not None:
            self._failure = self._failure or task.exception()
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
            ends = await asyncio.gather(*members, return_exceptions=True)
            # Those that failed leave last: until then no batch is sent that the cancelled ones are part of.
            for _ in range(ends.count(None)):
                self._slots.leave()
        self._failed_in_a_row[group.task.env_id] = 0
        group.trajectories.sort(key=lambda trajectory: trajectory.member)
        self._finished[index] = group
        self.window.finish(index)
        self._progress.set()

    def _drop(self, group: Group) -> None:
        kinds = ",".join(sorted(group.failures))
        self._ledger.dropped(group.index, f"failed:{kinds}", group.detail)
        self.counters["groups_failed"] += 1
        self._dropped.append(group)
        self.window.release(group.index)
        env_id = group.task.env_id
        self._failed_in_a_row[env_id] += 1
        self._failed_of[env_id, kinds] += 1
        why = f"{kinds} in {sum(group.failures.values())} attempts, the last: {group.detail or 'no reason given'}"
        if self._failed_in_a_row[env_id] > self._plan.max_failed_groups:
            raise EnvironmentFailsError(
                f"{env_id} failed {self._failed_in_a_row[env_id]} groups in a row "
                f"(rollout.max_failed_groups {self._plan.max_failed_groups}): {why}"
            )
        count = self._failed_of[env_id, kinds]
        # The first ones, and ever more rarely after them: an environment may fail now and then for a whole run.
        if count & (count - 1) == 0:
            self._report(f"{env_id}: {count} group{'s' if count > 1 else ''} dropped, {why}")

    async def _run_member(self, group: Group, member: int) -> Trajectory | None:
        """Play until there is a result; None when all attempts failed, and the group has to say that it left."""
        started = failed = False
        try:
            await self._slots.start()
            started = True
            for attempt in range(self._plan.max_attempts):
                trajectory = await self._attempt(group.task, member, attempt)
                if trajectory.outcome.is_result:
                    self.counters["episodes_finished"] += 1
                    return trajectory
                outcome = trajectory.outcome.value
                group.failures[outcome] = group.failures.get(outcome, 0) + 1
                group.detail = " ".join(trajectory.detail.split())[:_LONGEST_DETAIL]
                self.counters[f"episodes_{outcome}"] += 1
            failed = True
            return None
        finally:
            if not failed:
                self._slots.leave(started=started)

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
