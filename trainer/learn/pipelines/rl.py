"""Reinforcement learning from served environments. Agentic and verifiable-reward training are this one loop."""

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollgym.trainer.algorithms.credit import select_groups
from rollgym.trainer.algorithms.selection import refills
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.shutdown import GracefulShutdown, run_shielded
from rollgym.trainer.inference.base import InferenceClient
from rollgym.trainer.learn.batches import EpisodeBatch, RowBuilder, episode_batch, turns_of
from rollgym.trainer.learn.health import RunHealth, episode_health
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.step_metrics import (
    StepTimes,
    domain_metrics,
    episode_times,
    memory_metrics,
    outcome_metrics,
    response_metrics,
    rollout_metrics,
    step_times,
    token_rates,
)
from rollgym.trainer.learn.tracking import Tracker
from rollgym.trainer.learn.utilisation import TrainingWork
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.records.checkpoint import RunState
from rollgym.trainer.records.group import KEPT, Group, StepGroups
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.rollout.log_replay import LogReplay
from rollgym.trainer.rollout.scheduler import LeaveOut, RolloutScheduler
from rollgym.trainer.tasks.curriculum import CurriculumTaskSource

Evaluate = Callable[[int], Awaitable[None]]
"""Evaluates the policy after a step, if an evaluation is due."""


class Updater(Protocol):
    """Learns from batches of episodes: by reward, or from a teacher."""

    async def update(self, batch: EpisodeBatch, step: int, version: int | None = None) -> dict[str, float]:
        """Take the optimizer steps of one batch and return their metrics, without blocking the event loop."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the training loop.

    Attributes:
        updating: Held while weights change: pauses sampling in this process, which uses the same weights.
        health: Checks each step, and ends a run that learns nothing.
        log_replay: The rollout log, whose counters are metrics.
        resident: Held while models are used: keeps them on the accelerator, from which they may be offloaded otherwise.
        curriculum: Receives each step's successes, if the shares of domains depend on them.
        work: The operations of an update, for a step's metrics; None if unknown.
        backpressure: Metrics of the time spent waiting for overloaded environment servers.
        begins_early: Whether new groups may play while a step is written down, and a checkpoint with it: models may be
            on devices then that replies are sampled on.
    """

    algorithm: AlgorithmSettings
    scheduler: RolloutScheduler
    learner: Updater
    models: Models
    publisher: WeightPublisher
    client: InferenceClient
    build_rows: RowBuilder
    ledger: Ledger
    tracker: Tracker
    console: RunConsole
    health: RunHealth
    saver: Saver
    updating: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    log_replay: LogReplay | None = None
    resident: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    work: TrainingWork | None = None
    curriculum: CurriculumTaskSource | None = None
    backpressure: Callable[[], dict[str, float]] = dict
    begins_early: bool = True


async def train(
    parts: Parts,
    state: RunState,
    steps: int,
    checkpoint_every: int,
    evaluate: Evaluate,
    shutdown: GracefulShutdown,
) -> RunState:
    """Train until `steps` and return the run's state.

    Each step: take finished groups, choose among them, update, publish the weights, let new groups start, and write
    down what happened while they play. Whatever ends the loop before its time, the last whole step is saved.

    Raises:
        NothingToLearnError: If nothing was learnt for too long, or in all of the run.
    """
    saved, whole = state.step, True
    last_ended: float | None = None
    writing = _Writing()
    try:
        for step in range(state.step, steps):
            clock = _StepClock(last_ended, parts.client.counters.tokens_generated)
            groups = await parts.scheduler.next_groups(state.version)
            clock.waited = time.monotonic()
            with shutdown.deferred():
                whole = False
                metrics = await _update(parts, groups, step, state.version, clock)
                begins = parts.begins_early and step + 1 < steps
                plays = state.version + 1 if begins else None
                last_ended = await _record(parts, groups, step, metrics, clock, plays, writing)
                window = parts.scheduler.window
                state = RunState(
                    step + 1,
                    state.version + 1,
                    window.next_index,
                    window.untrained,
                    window.aside,
                    window.long_round,
                )
                whole = True
            if checkpoint_every and state.step % checkpoint_every == 0:
                with shutdown.deferred():
                    await writing.settled()
                    await parts.saver.save(state)
                    saved = state.step
            await evaluate(state.step)
            parts.saver.raise_if_failed()
            parts.health.check()
        parts.health.check_whole()
    finally:
        try:
            await writing.settled()
        finally:
            if whole and state.step > saved:
                await parts.saver.save(state)
            await parts.saver.settled()
    return state


class _Writing:
    """Writes the episodes of a step in a thread while the next step is under way."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def begin(self, work: Callable[[], None]) -> None:
        """Begin to write, once what was begun before is written; what went wrong with that is raised here."""
        await self.settled()
        self._task = asyncio.create_task(asyncio.to_thread(work))

    async def settled(self) -> None:
        """Wait until all that was begun is written.

        Raises:
            WriteError: If it could not be.
        """
        task, self._task = self._task, None
        if task is not None:
            await run_shielded(_result(task))


async def _result(task: asyncio.Task[None]) -> None:
    await task


class _StepClock:
    """Reads the clock at the boundaries between the parts of a step.

    Args:
        last_ended: When the step before ended.
        tokens_before: Tokens sampled in the whole run before this step began.
    """

    def __init__(self, last_ended: float | None, tokens_before: int) -> None:
        self.last_ended = last_ended
        self.tokens_before = tokens_before
        self.began = self.waited = self.trained = self.synced = time.monotonic()
        self.rows: list[tuple[int, int]] = []

    def ended(self) -> StepTimes:
        """Read it for the last time."""
        return StepTimes(
            self.began, self.waited, self.trained, self.synced, time.monotonic(), self.last_ended
        )


async def _update(
    parts: Parts, groups: StepGroups, step: int, version: int, clock: _StepClock
) -> dict[str, float]:
    """Train on groups, publish the weights, let new groups start, and return the step's metrics."""
    kept = await choose_groups(parts, groups.kept)
    batch = await asyncio.to_thread(episode_batch, kept, parts.build_rows)

    # Episodes of later steps, if any are allowed, run meanwhile.
    async with parts.updating(), parts.resident():
        updated = await parts.learner.update(batch, step, version)
        clock.trained = time.monotonic()
        clock.rows = list(
            zip([len(row.ids) for row in batch.rows], batch.mask.sum(dim=1).tolist(), strict=True)
        )
        sent = await parts.publisher.publish(parts.models.policy, version + 1)
    clock.synced = time.monotonic()

    account_for(parts.ledger, kept, batch, step)
    for group in groups.kept:
        parts.scheduler.release(group)
    parts.ledger.flush()
    return rollout_metrics(groups.played, kept, version) | updated | sent


async def _record(
    parts: Parts,
    step_groups: StepGroups,
    step: int,
    metrics: dict[str, float],
    clock: _StepClock,
    plays: int | None,
    writing: _Writing,
) -> float:
    """Let new groups start, write down what happened in a step, and return when it ended.

    Args:
        parts: The loop's.
        step_groups: The groups of the step.
        step: The step.
        metrics: What is known of it.
        clock: Its clock.
        plays: The version that plays the new groups; None if none is to start yet.
        writing: Writes the episodes, which the next step does not wait for.
    """
    groups = step_groups.played
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    dropped = parts.scheduler.take_dropped()
    metrics |= {f"rollout/{name}": float(count) for name, count in parts.scheduler.counters.items()}
    metrics |= parts.backpressure()
    if parts.log_replay is not None:
        metrics |= {f"rollout_log/{name}": float(count) for name, count in parts.log_replay.counters.items()}
    if parts.curriculum is not None:
        solved: dict[str, list[bool]] = {}
        for trajectory in trajectories:
            solved.setdefault(trajectory.task.domain, []).append(trajectory.success)
        metrics |= parts.curriculum.follow(step, solved, parts.scheduler.window.next_index)
    if plays is not None:
        parts.scheduler.begin_early(plays)
    metrics |= response_metrics(trajectories) | outcome_metrics([*groups, *dropped]) | episode_health(groups)
    metrics |= episode_times(trajectories) | domain_metrics(groups, dropped) | memory_metrics()
    await writing.begin(partial(parts.tracker.episodes, step, groups))
    if parts.tracker.wants_digests:
        async with parts.resident():
            digest = await asyncio.to_thread(digests, groups, parts.models)
        parts.tracker.digest(step, digest)
    generated = parts.client.counters.tokens_generated - clock.tokens_before
    times = clock.ended()
    metrics |= step_times(times, [trajectory.timeline for trajectory in trajectories])
    metrics |= token_rates(generated, sum(sampled for _, sampled in clock.rows), times)
    if parts.work is not None:
        metrics |= parts.work.metrics(clock.rows, times.train_s)
    metrics |= parts.health.note(step, metrics)
    parts.tracker.metrics(step + 1, metrics)
    parts.console.step(step, metrics)
    return times.ended


def leave_out(algorithm: AlgorithmSettings) -> LeaveOut:
    """Return the algorithm's filter for one group, for those that judge each by itself."""

    def reason(group: Group) -> str | None:
        dropped = select_groups(algorithm, turns_of([group])).dropped.get(group.index)
        return None if dropped is None else f"filter:{dropped}"

    return reason


async def choose_groups(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """Apply the algorithm's filter to the groups of a step; those that it drops are accounted for with the reason.

    A filter that refills has judged each group already, when it ended.
    """
    dropped: Mapping[int, str] = {}
    if not refills(parts.algorithm.filter):
        # A user's filter may be slow; in a thread, it does not block episodes of later steps.
        dropped = (await asyncio.to_thread(select_groups, parts.algorithm, turns_of(groups))).dropped
    for group in groups:
        reason = dropped.get(group.index)
        group.decision = KEPT if reason is None else f"filter:{reason}"
        if reason is not None:
            parts.ledger.dropped(group.index, group.decision)
    return [group for group in groups if group.decision == KEPT]


def account_for(ledger: Ledger, groups: Sequence[Group], batch: EpisodeBatch, step: int) -> None:
    """Note for each group of an updated batch that it was trained, or why it was not.

    A group was not trained if none of its episodes was chosen, or if all optimizer steps with them were skipped.
    """
    for group in groups:
        if group.index in batch.trained:
            ledger.trained([group.index], step)
        elif group.index in batch.chosen:
            ledger.dropped(group.index, "update:not_finite")
        else:
            ledger.dropped(group.index, "episodes:none_left")


def digests(groups: Sequence[Group], models: Models) -> dict[str, str]:
    """Return digests of a step's token ids, rewards and resulting weights, for comparing two runs bit by bit."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    ids = [[segment.ids for segment in trajectory.segments] for trajectory in trajectories]
    rewards = [[turn.reward for turn in trajectory.turns] for trajectory in trajectories]
    weights = hashlib.blake2b(digest_size=16)
    models.digest(weights)
    return {"ids": _digest(ids), "rewards": _digest(rewards), "weights": weights.hexdigest()}


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
