"""Plays groups of episodes: one asyncio task an episode, groups admitted by the window, oldest finished first.

A filter that judges each group by itself does so here, as soon as the group has ended: what it leaves out is named in
the ledger, and the next task of the stream takes its place in the same step (the dynamic sampling of DAPO,
arXiv:2503.14476).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from rollgym.trainer.core.errors import InvalidNumberError, RunError
from rollgym.trainer.records.group import KEPT, Group, GroupPlan, StepGroups
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.admission import AdmissionWindow
from rollgym.trainer.rollout.slots import EpisodeSlots, Slot
from rollgym.trainer.tasks.task import Task, TaskSource

_LONGEST_DETAIL = 300
"""Characters of a failure's reason that are kept: it may hold any text of an environment."""

_PATIENCE_WITH_CANCELLED_S = 10.0

PlayAttempt = Callable[[Task, int, int], Awaitable[Trajectory]]
"""Plays (task, member, attempt). If the outcome is not a result, the scheduler plays a replacement."""


LeaveOut = Callable[[Group], str | None]
"""Says why a group is not trained on; None keeps it."""


JudgeGroup = Callable[[Group], Awaitable[None]]
"""Gives the episodes of a whole group their rewards."""


class EnvironmentFailsError(RunError):
    """An environment has failed group after group; the message has its reason."""


class NothingToLearnError(RunError):
    """There is nothing to learn from what is played: a filter has left out every group, or nothing was learnt."""


class RolloutScheduler:
    """Keeps the window's groups playing and hands finished ones to training.

    Args:
        source: The task stream.
        window: Decides which groups may run, and which finished one comes next.
        play: Plays one episode.
        plan: Numbers of episodes and limits of a group.
        ledger: Records every task that is issued or dropped.
        slots: Notified of every episode's start and end.
        report: Receives messages for people on why groups were dropped.
        disconnected: Whether episodes now wait for a server that is down. That time does not count towards their limit.
        leave_out: The filter; None keeps every group.
        times_aside: Number of times that tasks were put aside before a restart.
        judge: Gives whole groups their rewards; None if episodes are rewarded one by one.
    """

    def __init__(
        self,
        source: TaskSource,
        window: AdmissionWindow,
        play: PlayAttempt,
        plan: GroupPlan,
        ledger: Ledger,
        slots: EpisodeSlots,
        report: Callable[[str], None] = lambda _: None,
        disconnected: Callable[[], Awaitable[bool]] | None = None,
        leave_out: LeaveOut | None = None,
        times_aside: Mapping[int, int] | None = None,
        judge: JudgeGroup | None = None,
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
        self._leave_out = leave_out
        self._judge = judge
        self._left_out: list[Group] = []
        self._failed_in_a_row: Counter[str] = Counter()
        self._failed_of: Counter[tuple[str, str]] = Counter()
        self._tasks: dict[asyncio.Task[None], int] = {}
        self._taken: list[Group] = []
        self._closed = False
        self._left_behind: set[asyncio.Future[Trajectory]] = set()
        self._stopping: set[asyncio.Task[None]] = set()
        self._times_aside: Counter[int] = Counter(times_aside)
        self._finished: dict[int, Group] = {}
        self._progress = asyncio.Event()
        self._failure: BaseException | None = None
        self._dropped: list[Group] = []

    def admit(self, version: int) -> None:
        """Start as many groups as the window allows, stamped with the policy version that plays them first."""
        if self._closed:
            return
        for index in self.window.admit(version):
            self._ledger.issued(index, version)
            slots = [Slot(self._slots) for _ in range(self._plan.sampled + self._plan.greedy)]
            task = asyncio.get_running_loop().create_task(self._run_group(index, version, slots))
            self._tasks[task] = index
            task.add_done_callback(partial(self._group_ended, slots))

    def begin_early(self, version: int) -> None:
        """Start the groups of the next step, or of later ones, while the step before is written down.

        In deterministic mode they wait for `next_groups`: an evaluation comes first, and shares batches with none.

        Args:
            version: The policy version that plays them.
        """
        if self._plan.replace_at_once:
            self.admit(version)

    async def next_groups(self, version: int) -> StepGroups:
        """Return the groups of the next training step, chosen oldest finished first.

        They are fewer than `groups_per_step` only if a filter has left out more than `GroupPlan.max_left_out`.

        Raises:
            Exception: An error of a group for which a retry cannot help.
            EnvironmentFailsError: If an environment fails all of its groups.
            NothingToLearnError: If a filter has left out that many and kept none.
        """
        self.admit(version)
        kept = self._taken  # of a call that was cancelled, too
        while len(kept) < self.window.groups_per_step:
            index = self.window.take(version)
            if index is not None:
                kept.append(self._finished.pop(index))
            elif self._gave_up and not self.window.waits:
                self._say_short(kept)
                break
            else:
                await self._something_happens()
                if (self._plan.replace_at_once or not self._tasks) and not self._gave_up:
                    self.admit(version)
        self._put_aside(version)
        self._taken = []
        # Who of them ended first is a matter of time; what is trained on must not be.
        kept.sort(key=lambda group: group.index)
        left_out, self._left_out = self._left_out, []
        return StepGroups(kept, sorted(left_out, key=lambda group: group.index))

    def release(self, group: Group) -> None:
        """Forget a group that was trained or dropped, so that a new one may start."""
        self.window.release(group.index)

    def take_dropped(self) -> list[Group]:
        """Return the groups that failed since this was last asked, with what their episodes came to."""
        dropped, self._dropped = self._dropped, []
        return dropped

    async def close(self) -> None:
        """Cancel everything that still plays; nothing is played any more."""
        self._closed = True
        self._failure = self._failure or RunError("the rollout scheduler was closed")
        self._progress.set()
        tasks = [*self._tasks, *self._stopping]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _something_happens(self) -> None:
        """Wait until a group has ended; one may have failed while no caller waited."""
        if self._failure is None:
            await self._progress.wait()
            self._progress.clear()
        if self._failure is not None:
            raise self._failure

    @property
    def _gave_up(self) -> bool:
        """Whether a filter has left out so many groups that the step plays no further ones."""
        return self._plan.max_left_out is not None and len(self._left_out) >= self._plan.max_left_out

    def _say_short(self, kept: Sequence[Group]) -> None:
        """Report a step that trains on fewer groups than it should.

        Raises:
            NothingToLearnError: The step has no group at all.
        """
        reasons = Counter(group.decision for group in self._left_out)
        why = (
            f"{len(self._left_out)} groups played for one step were left out "
            f"({', '.join(f'{count} by {reason}' for reason, count in sorted(reasons.items()))})"
        )
        if not kept:
            raise NothingToLearnError(
                f"{why} and none was kept: these tasks are too easy or too hard for this policy. Choose others, raise "
                "rollout.group_size, or raise algorithm.filter.max_rounds"
            )
        self.counters["steps_short"] += 1
        self._report(f"a step trains on {len(kept)} of {self.window.groups_per_step} groups: {why}")

    def _put_aside(self, version: int) -> None:
        """Stop the groups that were not ready in time; they restart in a later round."""
        late = set(self.window.put_aside(version))
        for index in late:
            self._ledger.put_aside(index, version)
            self._finished.pop(index, None)
            self._times_aside[index] += 1
            self.counters["groups_put_aside"] += 1
        for task, index in list(self._tasks.items()):
            if index in late:
                self._tasks.pop(task)
                self._stopping.add(task)
                task.cancel()

    def _group_ended(self, slots: Sequence[Slot], task: asyncio.Task[None]) -> None:
        for slot in slots:
            slot.leave()  # a group that is cancelled before its first turn runs none of its own code
        if task in self._stopping:
            self._stopping.discard(task)
            if task.cancelled() or task.exception() is None:
                return
        self._tasks.pop(task, None)
        if task.cancelled():
            # After `close` no caller waits. Any other cancellation of a group loses its result.
            self._failure = self._failure or RunError("a group of episodes was cancelled while it played")
        elif task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._progress.set()

    async def _run_group(self, index: int, version: int, slots: Sequence[Slot]) -> None:
        group = Group(index, self._source.task(index), version)
        members = [
            asyncio.get_running_loop().create_task(self._run_member(group, member, slot))
            for member, slot in enumerate(slots)
        ]
        sampled, greedy = members[: self._plan.sampled], members[self._plan.sampled :]
        try:
            for finished in asyncio.as_completed(sampled):
                trajectory = await finished
                if trajectory is None:
                    self._drop(group)
                    return
                group.trajectories.append(trajectory)
                if len(group.trajectories) == self._plan.size:
                    break
            for baseline in greedy:
                group.greedy = await baseline
                if group.greedy is None:
                    self._drop(group)
                    return
        finally:
            self.counters["episodes_surplus"] += sum(not member.done() for member in sampled)
            for member in members:
                member.cancel()
            await asyncio.gather(*members, return_exceptions=True)
            # One that failed leaves last: until then no batch is sent that the cancelled ones are part of.
            for slot in slots:
                slot.leave()
        group.trajectories.sort(key=lambda trajectory: trajectory.member)
        if await self._judged(group):
            self._failed_in_a_row[group.task.env_id] = 0
            self._hand_over(group)
        else:
            self._drop(group)

    async def _judged(self, group: Group) -> bool:
        """Give a whole group its rewards, if the run has a judge; return whether they are finite."""
        if self._judge is None:
            return True
        limit = asyncio.timeout(self._plan.episode_timeout_s)
        try:
            async with limit:
                await self._judge(group)
        except TimeoutError:
            if not limit.expired():
                raise
            group.failures[TrajectoryOutcome.TIMEOUT.value] = len(group.trajectories)
            seconds = f"{self._plan.episode_timeout_s:g} s"
            group.detail = f"no rewards of the group within {seconds} (rollout.episode_timeout_s)"
            return False
        except InvalidNumberError as error:
            group.failures[TrajectoryOutcome.INVALID_NUMBER.value] = len(group.trajectories)
            group.detail = _brief(str(error))
            return False
        return True

    def _hand_over(self, group: Group) -> None:
        """Give a whole group to training, or leave it out and free its place."""
        reason = self._leave_out(group) if self._leave_out else None
        group.decision = reason or KEPT
        if reason is None:
            self._finished[group.index] = group
            self.window.finish(group.index)
        else:
            self._left_out.append(group)
            self._ledger.dropped(group.index, reason)
            self.counters["groups_left_out"] += 1
            self.window.release(group.index)

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

    async def _run_member(self, group: Group, member: int, slot: Slot) -> Trajectory | None:
        """Play until there is a result; None when all attempts failed: then the slot is left with the group."""
        failed = False
        try:
            await slot.start(group.task, member)
            # A group that was put aside restarts with new attempt numbers: nothing drawn or recorded before is reused.
            first = self._times_aside[group.index] * self._plan.max_attempts
            for attempt in range(first, first + self._plan.max_attempts):
                trajectory = await self._attempt(group.task, member, attempt)
                if trajectory.outcome.is_result:
                    self.counters["episodes_finished"] += 1
                    return trajectory
                outcome = trajectory.outcome.value
                group.failures[outcome] = group.failures.get(outcome, 0) + 1
                group.detail = _brief(trajectory.detail)
                self.counters[f"episodes_{outcome}"] += 1
                if trajectory.outcome is TrajectoryOutcome.UNPLAYABLE:
                    break  # the next attempt would end as this one
            failed = True
            return None
        finally:
            if not failed:
                slot.leave()

    async def _attempt(self, task: Task, member: int, attempt: int) -> Trajectory:
        playing = asyncio.ensure_future(self._play(task, member, attempt))
        try:
            while not (await asyncio.wait((playing,), timeout=self._plan.episode_timeout_s))[0]:
                if self._disconnected is None or not await self._disconnected():
                    break  # else it is not the episode that hangs
            else:
                return playing.result()
        finally:
            if playing.done():
                self._stopped(playing)
            else:
                await self._stop(playing, task)
        hung = Trajectory(task, member, attempt, outcome=TrajectoryOutcome.TIMEOUT)
        hung.detail = f"no end within {self._plan.episode_timeout_s:g} s (rollout.episode_timeout_s)"
        return hung

    async def _stop(self, playing: asyncio.Future[Trajectory], task: Task) -> None:
        """Cancel an episode. One that does not end then, such as an agent that catches everything, is abandoned."""
        playing.cancel()
        self._left_behind.add(playing)
        playing.add_done_callback(self._stopped)
        await asyncio.wait((playing,), timeout=_PATIENCE_WITH_CANCELLED_S)
        if not playing.done():
            self.counters["episodes_left_behind"] += 1
            self._report(
                f"{task.env_id}: an episode does not end although it was cancelled, and is left behind"
            )

    def _stopped(self, playing: asyncio.Future[Trajectory]) -> None:
        self._left_behind.discard(playing)
        if not playing.cancelled():
            playing.exception()  # the failure is known already, or no caller waits for it


def _brief(detail: str) -> str:
    """Return a reason in one line, without its middle if it is long: a program's last words say why it ended."""
    line = " ".join(detail.split())
    end = _LONGEST_DETAIL * 2 // 3
    if len(line) <= _LONGEST_DETAIL:
        return line
    return f"{line[: _LONGEST_DETAIL - end]} ... {line[-end:]}"
