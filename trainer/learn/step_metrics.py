"""Metrics of a training step: episodes, replies, outcomes, time and memory. Pure functions.

`records/run_metrics.py` says of every number what it is.
"""

import contextlib
import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollgym.trainer.records.group import Group
from rollgym.trainer.records.trajectory import Phase, Timeline, Trajectory, TrajectoryOutcome

_OF_THE_WAIT = (Phase.GENERATE, Phase.ENVIRONMENT, Phase.VERIFY)
"""Named phases of the time in which a step waits for episodes; the rest is `wait`."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When the parts of a step began, on the clock of the episodes' timelines; each lasts until the next.

    Attributes:
        waiting: The step begins, and waits for finished groups.
        training: All groups are there.
        syncing: The update is over, and weights are published.
        recording: The weights are out, and what happened is written down.
        ended: The time at which the step's metrics were collected.
        last_ended: When the step before ended; None for the first one of a process.
    """

    waiting: float
    training: float
    syncing: float
    recording: float
    ended: float
    last_ended: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.ended - self.waiting

    @property
    def train_s(self) -> float:
        """Seconds that the update took."""
        return self.syncing - self.training


def rollout_metrics(groups: Sequence[Group], kept: Sequence[Group], version: int) -> dict[str, float]:
    """Return what the episodes of a step were like: means over episodes, never over turns.

    Args:
        groups: The groups of the step.
        kept: Those of them that were trained on.
        version: The policy version that the step trained.
    """
    trajectories = _episodes(groups)
    turns = [len(trajectory.steps) for trajectory in trajectories]
    lags = [version - trajectory.oldest_version for trajectory in trajectories]
    return {
        "rollout/success": _mean([float(trajectory.success) for trajectory in trajectories]),
        "rollout/reward": _mean([trajectory.total_reward for trajectory in trajectories]),
        "rollout/turns": _mean([float(count) for count in turns]),
        "rollout/action_tokens": _mean([float(trajectory.action_tokens) for trajectory in trajectories]),
        "rollout/prefix_breaks": _mean([float(trajectory.prefix_breaks) for trajectory in trajectories]),
        "rollout/valid_replies": _mean(
            [_mean([float(turn.action_is_valid) for turn in trajectory.steps]) for trajectory in trajectories]
        ),
        "rollout/lag_mean": _mean([float(lag) for lag in lags]),
        "rollout/lag_max": float(max(lags, default=0)),
        "rollout/groups_kept": float(len(kept)),
    } | _prefix_breaks_by_kind(trajectories)


def _prefix_breaks_by_kind(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    kinds = Counter(kind for trajectory in trajectories for kind in trajectory.prefix_break_kinds.elements())
    return {
        f"rollout/prefix_breaks_{kind}": count / len(trajectories) for kind, count in sorted(kinds.items())
    }


def domain_metrics(groups: Sequence[Group], dropped: Sequence[Group]) -> dict[str, float]:
    """Return what the episodes of each domain were like: success, reward, replies, outcomes, times, its own metrics.

    Args:
        groups: The groups of the step.
        dropped: Those that failed while the step waited.
    """
    metrics: dict[str, float] = {}
    for domain, (of_step, failed) in _by_domain(groups, dropped).items():
        trajectories = _episodes(of_step)
        numbers = _own_metrics(trajectories) | response_metrics(trajectories)
        numbers |= outcome_metrics([*of_step, *failed]) | episode_times(trajectories)
        if trajectories:
            numbers["success"] = _mean([float(trajectory.success) for trajectory in trajectories])
            numbers["reward"] = _mean([trajectory.total_reward for trajectory in trajectories])
        metrics |= {f"domain/{domain}/{name}": value for name, value in numbers.items()}
    return metrics


def response_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return how long replies were, in sampled tokens, and which fraction of them ended at the length limit.

    Every reply counts once. Empty if no token was sampled.
    """
    replies = [turn for trajectory in trajectories for turn in trajectory.turns if turn.segment >= 0]
    if not replies:
        return {}
    lengths = [turn.end - turn.start for turn in replies]
    return {
        "response/tokens_mean": _mean([float(length) for length in lengths]),
        "response/tokens_p95": float(np.percentile(lengths, 95)),
        "response/clipped": _mean([float(turn.finish_reason == "length") for turn in replies]),
    }


def outcome_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return the rate of each outcome among all attempts at episodes, those that were replaced included."""
    counts = Counter(dict.fromkeys(TrajectoryOutcome, 0))
    for group in groups:
        counts.update(trajectory.outcome for trajectory in group.trajectories)
        counts.update({TrajectoryOutcome(name): count for name, count in group.failures.items()})
    attempts = counts.total()
    return (
        {f"outcome/{outcome.value}": count / attempts for outcome, count in counts.items()}
        if attempts
        else {}
    )


def episode_times(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return how long an episode lasted, and the mean of each phase; these sum to the mean of the whole."""
    if not trajectories:
        return {}
    phases = [trajectory.timeline.seconds() for trajectory in trajectories]
    lasted = [sum(seconds.values()) for seconds in phases]
    metrics = {"episode/seconds_mean": _mean(lasted), "episode/seconds_p95": float(np.percentile(lasted, 95))}
    return metrics | {
        f"episode/{phase.value}_s": _mean([seconds[phase.value] for seconds in phases]) for phase in Phase
    }


def step_times(times: StepTimes, timelines: Sequence[Timeline]) -> dict[str, float]:
    """Return the parts of a step's wall-clock time.

    `generate_s`, `environment_s`, `verify_s`, `wait_s`, `train_s`, `sync_s` and `record_s` sum to `step_s`; the first
    four to `rollout_s`, the time in which the step waited for groups. Each moment of that is divided evenly among the
    step's episodes that were not over yet, by what each of them waited for. `outside_s` is the time between two
    steps: evaluation, checkpoints and writing.
    """
    rollout_s = times.training - times.waiting
    shares = divided(times.waiting, times.training, timelines)
    named = {phase: shares[phase] for phase in _OF_THE_WAIT}
    metrics = {f"time/{phase.value}_s": seconds for phase, seconds in named.items()}
    metrics |= {
        "time/wait_s": rollout_s - sum(named.values()),
        "time/train_s": times.train_s,
        "time/sync_s": times.recording - times.syncing,
        "time/record_s": times.ended - times.recording,
        "time/rollout_s": rollout_s,
        "time/step_s": times.step_s,
    }
    if times.last_ended is not None:
        metrics["time/outside_s"] = times.waiting - times.last_ended
    return metrics


def divided(since: float, until: float, timelines: Sequence[Timeline]) -> dict[Phase, float]:
    """Divide the time from `since` to `until` among phases, each moment evenly among the episodes that run then.

    Moments without a running episode belong to no phase.
    """
    shares = dict.fromkeys(Phase, 0.0)
    spans = [
        (max(start, since), min(end, until), phase)
        for timeline in timelines
        for start, end, phase in timeline.spans()
        if start < until and end > since
    ]
    if not spans:
        return shares
    moments, phases = np.unique([moment for span in spans for moment in span[:2]]), list(Phase)
    # How many episodes are in each phase from each moment to the next: [phases, moments].
    row = np.array([phases.index(phase) for _, _, phase in spans]) * len(moments)
    begun, over = (
        np.bincount(
            row + np.searchsorted(moments, [span[index] for span in spans]),
            minlength=len(phases) * len(moments),
        ).reshape(len(phases), len(moments))
        for index in (0, 1)
    )
    playing = (begun - over).cumsum(axis=1)[:, :-1].astype(np.float64)
    total = playing.sum(axis=0)
    parts = np.divide(playing, total, out=np.zeros_like(playing), where=total > 0)
    return dict(zip(phases, (parts @ np.diff(moments)).tolist(), strict=True))


def token_rates(generated: int, trained: int, times: StepTimes) -> dict[str, float]:
    """Return throughput: tokens generated and trained per second.

    Args:
        generated: Tokens that were sampled during the step.
        trained: Sampled tokens of the rows that it trained on.
        times: Times of the step.
    """
    return {
        "time/tokens_per_s": generated / times.step_s if times.step_s > 0 else 0.0,
        "time/trained_tokens_per_s": trained / times.train_s if times.train_s > 0 else 0.0,
    }


def memory_metrics() -> dict[str, float]:
    """Return this process's memory, and the accelerator's if there is one, in GiB."""
    metrics = {"memory/rss_peak_gib": _peak_bytes() / 2**30}
    if (resident := _resident_bytes()) is not None:
        metrics["memory/rss_gib"] = resident / 2**30
    accelerator = torch.accelerator
    # Newer versions of torch only say it of any accelerator.
    if accelerator.is_available() and hasattr(accelerator, "max_memory_allocated"):
        metrics["memory/accelerator_gib"] = accelerator.memory_allocated() / 2**30
        metrics["memory/accelerator_peak_gib"] = accelerator.max_memory_allocated() / 2**30
    return metrics


def _peak_bytes() -> int:
    """The most memory that this process ever had; `getrusage` also counts that of the one which started it."""
    with contextlib.suppress(OSError):  # only Linux says it there
        for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _resident_bytes() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None  # only Linux says it there
    return pages * resource.getpagesize()


def _by_domain(
    groups: Sequence[Group], dropped: Sequence[Group]
) -> Mapping[str, tuple[list[Group], list[Group]]]:
    domains: dict[str, tuple[list[Group], list[Group]]] = {}
    for index, part in enumerate((groups, dropped)):
        for group in part:
            domains.setdefault(group.task.domain, ([], []))[index].append(group)
    return domains


def _own_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of what the environment reported; each over the episodes in which it did."""
    reported: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            reported.setdefault(name, []).append(value)
    return {name: _mean(values) for name, values in sorted(reported.items())}


def _episodes(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
