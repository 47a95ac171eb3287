"""Reinforcement learning from served environments. Agentic and verifiable-reward training are this one loop."""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from trainer.algorithms.filters import refills
from trainer.algorithms.objective import select_groups
from trainer.algorithms.settings import AlgorithmSettings
from trainer.core.console import RunConsole
from trainer.core.ending import Ending, to_its_end
from trainer.core.errors import RunError
from trainer.core.numbers import not_finite
from trainer.inference.base import InferenceClient
from trainer.learn.batches import episode_batch, turns_of
from trainer.learn.learner import Learner, Models
from trainer.learn.rows import RowBuilder
from trainer.learn.tracking import Tracker
from trainer.records.checkpoint import CheckpointStore, RunState
from trainer.records.ledger import Ledger
from trainer.records.trajectory import Group, Trajectory
from trainer.rollout.recall import Recall
from trainer.rollout.scheduler import LeaveOut, RolloutScheduler, StepGroups
from trainer.weights.publisher import WeightPublisher

Evaluate = Callable[[int], Awaitable[None]]
"""Measures the policy after so many steps, if it is time to."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop drives.

    Attributes:
        updating: Entered for as long as weights change: who samples with these very weights stands still.
    """

    algorithm: AlgorithmSettings
    scheduler: RolloutScheduler
    learner: Learner
    models: Models
    publisher: WeightPublisher
    client: InferenceClient
    build_rows: RowBuilder
    ledger: Ledger
    tracker: Tracker
    console: RunConsole
    checkpoints: CheckpointStore
    updating: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    recall: Recall | None = None


async def train(
    parts: Parts, state: RunState, steps: int, checkpoint_every: int, evaluate: Evaluate, ending: Ending
) -> RunState:
    """Train until `steps` and return where the run stands.

    Each step: take finished groups, choose among them, update, publish the weights, let new groups start. Whatever
    ends the loop before its time, the last whole step is saved.
    """
    saved, whole = state.step, True
    try:
        for step in range(state.step, steps):
            started, tokens_before = time.monotonic(), parts.client.counters.tokens_generated
            groups = await parts.scheduler.next_groups(state.version)
            with ending.deferred():
                whole = False
                metrics = await _update(parts, groups, step, state.version)
                elapsed = time.monotonic() - started
                metrics["time/step_s"] = elapsed
                generated = parts.client.counters.tokens_generated - tokens_before
                metrics["time/tokens_per_s"] = generated / elapsed
                await _record(parts, groups, step, metrics)
                window = parts.scheduler.window
                state = RunState(step + 1, state.version + 1, window.next_index, window.untrained)
                whole = True
            if checkpoint_every and state.step % checkpoint_every == 0:
                with ending.deferred():
                    await save(parts, state)
                    saved = state.step
            await evaluate(state.step)
    finally:
        if whole and state.step > saved:
            await save(parts, state)
    return state


async def _update(parts: Parts, groups: StepGroups, step: int, version: int) -> dict[str, float]:
    """Train on groups, publish the weights, let new groups start, and return the step's metrics."""
    kept = choose_groups(parts, groups.kept)
    batch = episode_batch(kept, parts.build_rows)

    # Episodes of later steps, if any are allowed, go on meanwhile.
    async with parts.updating():
        updated = await parts.learner.update(batch, step)
        await parts.publisher.publish(parts.models.policy, version + 1)

    account_for(parts.ledger, kept, updated, step)
    for group in groups.kept:
        parts.scheduler.release(group)
    parts.ledger.flush()
    return rollout_metrics(groups.played, kept, version) | updated


async def _record(parts: Parts, step_groups: StepGroups, step: int, metrics: dict[str, float]) -> None:
    """Write down what happened in a step."""
    groups = step_groups.played
    metrics["time/wait_s"] = parts.scheduler.waited_s
    metrics |= {f"rollout/{name}": float(count) for name, count in parts.scheduler.counters.items()}
    parts.tracker.episodes(step, groups)
    if parts.tracker.wants_digests:
        parts.tracker.digest(step, await asyncio.to_thread(digests, groups, parts.models))
    parts.tracker.metrics(step + 1, metrics)
    parts.console.step(step, metrics)


def leave_out(algorithm: AlgorithmSettings) -> LeaveOut:
    """Return the algorithm's filter for one group, for those that judge each by itself."""

    def reason(group: Group) -> str | None:
        dropped = select_groups(algorithm, turns_of([group])).dropped.get(group.index)
        return None if dropped is None else f"filter:{dropped}"

    return reason


def choose_groups(parts: Parts, groups: Sequence[Group]) -> list[Group]:
    """Apply the algorithm's filter to the groups of a step; those that it drops are accounted for with the reason.

    A filter that refills has judged each group already, when it ended.
    """
    judged = refills(parts.algorithm.filter)
    dropped = {} if judged else select_groups(parts.algorithm, turns_of(groups)).dropped
    for group in groups:
        reason = dropped.get(group.index)
        group.decision = "kept" if reason is None else f"filter:{reason}"
        if reason is not None:
            parts.ledger.dropped(group.index, group.decision)
    return [group for group in groups if group.decision == "kept"]


def account_for(ledger: Ledger, groups: Sequence[Group], updated: Mapping[str, float], step: int) -> None:
    """Say of groups that they were trained, or that the update left all its steps out."""
    if updated.get("policy/skipped_steps") and not updated.get("policy/optimizer_steps"):
        for group in groups:
            ledger.dropped(group.index, "update:not_finite")
    else:
        ledger.trained([group.index for group in groups], step)


async def save(parts: Parts, state: RunState) -> None:
    """Write a checkpoint, and everything that belongs to the steps before it, while the event loop goes on.

    Whatever is cancelled meanwhile, it is written to its end.

    Raises:
        RunError: If a weight, or a number of an optimizer, is not finite: then nothing is written.
    """
    parts.tracker.flush()
    parts.ledger.flush()
    await to_its_end(asyncio.to_thread(_save, parts, state))


def _save(parts: Parts, state: RunState) -> None:
    saved = parts.models.state_dicts()
    if broken := list(not_finite(saved)):
        raise RunError(
            f"no checkpoint of step {state.step} is written, because {broken[0]} is not finite (of {len(broken)} such "
            "tensors): lower optimizer.learning_rate"
        )
    parts.checkpoints.save(state, saved)
    if parts.recall is not None:
        parts.recall.settle(state.next_task, state.untrained)


def rollout_metrics(groups: Sequence[Group], kept: Sequence[Group], version: int) -> dict[str, float]:
    """Return what the episodes of a step were like: means over episodes, never over turns."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    turns = [len(trajectory.turns) for trajectory in trajectories]
    lags = [version - trajectory.oldest_version for trajectory in trajectories]
    metrics = {
        "rollout/success": _mean([float(trajectory.success) for trajectory in trajectories]),
        "rollout/reward": _mean([trajectory.total_reward for trajectory in trajectories]),
        "rollout/turns": _mean([float(count) for count in turns]),
        "rollout/action_tokens": _mean([float(trajectory.action_tokens) for trajectory in trajectories]),
        "rollout/forks": _mean([float(trajectory.forks) for trajectory in trajectories]),
        "rollout/valid_replies": _mean(
            [_mean([float(turn.action_is_valid) for turn in trajectory.turns]) for trajectory in trajectories]
        ),
        "rollout/lag_mean": _mean([float(lag) for lag in lags]),
        "rollout/lag_max": float(max(lags)),
        "rollout/groups_kept": float(len(kept)),
    }
    forks = sum((trajectory.fork_kinds for trajectory in trajectories), Counter())
    metrics |= {f"rollout/forks_{kind}": count / len(trajectories) for kind, count in sorted(forks.items())}
    return metrics | _by_domain(trajectories)


def _by_domain(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    domains: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        domains.setdefault(trajectory.task.domain, []).append(trajectory)
    metrics = {}
    for domain, played in domains.items():
        metrics[f"domain/{domain}/success"] = _mean([float(trajectory.success) for trajectory in played])
        metrics[f"domain/{domain}/reward"] = _mean([trajectory.total_reward for trajectory in played])
        names = {name for trajectory in played for name in trajectory.metrics}
        for name in sorted(names):
            values = [trajectory.metrics[name] for trajectory in played if name in trajectory.metrics]
            metrics[f"domain/{domain}/{name}"] = _mean(values)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


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
