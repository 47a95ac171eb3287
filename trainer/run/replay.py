"""`roll-train replay`: steps of a recorded run, repeated from its records to the same weights."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollgym.trainer.cluster.cluster import open_cluster
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.load import load_own_settings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import CheckpointError, ConfigError, RunError
from rollgym.trainer.core.run_files import CONFIG_FILE, lines_and_sizes, read_lines, run_lock, write_errors
from rollgym.trainer.learn.batches import RowBuilder, episode_batch, row_builder
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines.offline import weights_digest
from rollgym.trainer.learn.pipelines.rl import Updater
from rollgym.trainer.learn.tracking import DIGESTS_FILE, EPISODES_FILE
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState, load_checkpoint
from rollgym.trainer.records.group import KEPT, Group
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.run.learners import make_learner
from rollgym.trainer.run.models import open_models
from rollgym.trainer.run.policy import Policy, build_policy
from rollgym.trainer.run.trained_policy import save_policy


@dataclass(frozen=True, slots=True)
class _Opened:
    """A run's models and what updates them, as the run began."""

    models: Models
    learner: Updater
    build_rows: RowBuilder
    policy: Policy


async def replay(run: Path, steps: Sequence[int], *, from_start: bool, output: Path | None) -> int:
    """Repeat steps of a run, and report for each whether its weights equal the recorded ones.

    A step is an update by the episodes that the run trained it on, which its records hold with their tokens,
    log-probabilities, versions and rewards. So asynchronous runs are replayed as well as others, without any
    environment and without sampling.

    Args:
        run: The run's directory.
        steps: The steps to repeat, counted from 0.
        from_start: Whether to begin at the run's beginning, and ignore all checkpoints.
        output: Target folder for the model after the last step; None writes no model.

    Returns:
        The exit code: 1 if weights differ.

    Raises:
        ConfigError: If the directory holds no run that can be replayed; the message says what its run lacked. Or if
            another process writes to `output`.
        CheckpointError: If there is nothing to begin at.
    """
    settings = _settings_of(run)
    wanted = sorted(set(steps))
    recorded = _recorded_digests(run, wanted)
    console = RunConsole(wanted[-1] + 1, live=True)
    differing: list[int] = []
    try:
        async with _opened(settings, run, console, output) as opened:
            state = await asyncio.to_thread(
                _begin, settings, run, opened.models, wanted[0], from_start, console
            )
            console.begin("replaying", wanted[-1] + 1 - state.step)
            groups = _steps_of(run, state.step, wanted[-1])
            for step in range(state.step, wanted[-1] + 1):
                await _take(opened, next(groups), step, state.version + step - state.step)
                console.advance(step + 1 - state.step)
                if step in recorded:
                    found = await asyncio.to_thread(weights_digest, opened.models)
                    equal = found == recorded[step]
                    if not equal:
                        differing.append(step)
                    told = "as recorded" if equal else f"DIFFER: the run recorded {recorded[step]}"
                    console.say(f"step {step}: weights {found}, {told}")
            if output is not None:
                with write_errors(output):
                    console.say(
                        await asyncio.to_thread(save_policy, opened.models.policy, opened.policy, output)
                    )
    finally:
        console.close()
    if differing:
        sys.stderr.write(
            f"roll-train: the weights of {len(differing)} of {len(wanted)} steps differ: they are rounded otherwise on "
            "another kind of processor, with another number of threads (threads), or another release of torch\n"
        )
    return 1 if differing else 0


def _settings_of(run: Path) -> RunSettings:
    path = run / CONFIG_FILE
    if not path.exists():
        raise ConfigError(f"{run} holds no run: it has no {CONFIG_FILE}")
    settings = load_own_settings(path)
    if not settings.plays:
        raise ConfigError(
            f"{run} is a run of roll-train {settings.section}, whose steps depend on its data alone: run it again with "
            "another output_dir and compare the digests (tracking.digests)"
        )
    for file, setting in ((EPISODES_FILE, "episodes"), (DIGESTS_FILE, "digests")):
        if not (run / file).exists():
            raise ConfigError(
                f"{run} has no {file}: a run is replayed that was made with tracking.{setting}=true"
            )
    return settings


def _recorded_digests(run: Path, wanted: Sequence[int]) -> dict[int, str]:
    found = {line["step"]: str(line["weights"]) for line in read_lines(run / DIGESTS_FILE, "step")}
    if missing := [step for step in wanted if step not in found]:
        last = max(found, default=None)
        has = "none" if last is None else f"those from {min(found)} to {last}"
        raise ConfigError(f"{run} has no digest of step {missing[0]}, but {has}: give one of them as --step")
    return {step: found[step] for step in wanted}


@asynccontextmanager
async def _opened(
    settings: RunSettings, run: Path, console: RunConsole, output: Path | None
) -> AsyncIterator[_Opened]:
    torch.set_num_threads(settings.threads)
    async with AsyncExitStack() as stack:
        if output is not None:
            stack.enter_context(run_lock(output, "--output"))
        trains_here = settings.backend.in_process
        policy = await asyncio.to_thread(build_policy, settings, trained=trains_here, computes=trains_here)
        cluster = await stack.enter_async_context(
            open_cluster(settings, place_roles(settings), _died, console.say)
        )
        made = await stack.enter_async_context(open_models(settings, policy, run, console, cluster))
        models = await asyncio.to_thread(made.models)
        learner = await make_learner(settings, models, policy, stack)
        yield _Opened(models, learner, row_builder(settings.rows), policy)


def _died(error: Exception) -> None:
    raise RunError(str(error))


def _begin(
    settings: RunSettings, run: Path, models: Models, step: int, from_start: bool, console: RunConsole
) -> RunState:
    """Bring models to the newest checkpoint at or before a step, or leave them as the run began.

    Raises:
        CheckpointError: If the run began with a warm start and no checkpoint has it.
    """
    store = CheckpointStore(run / "checkpoints", settings.checkpoint.keep)
    folder = None if from_start else store.newest_until(step)
    if settings.warm_start is not None and folder is None:
        folder = store.newest_until(0)
        if folder is None:
            raise CheckpointError(
                f"{run} began with a warm start, and neither its checkpoint (step 0) nor one up to step {step} is "
                "there any more: keep more of them with checkpoint.keep"
            )
    if folder is None:
        console.say("replaying from the run's beginning")
        return RunState(0, 0, 0, ())
    checkpoint = load_checkpoint(folder)
    try:
        models.load_state_dicts(checkpoint.parts)
    except ValueError as error:
        raise CheckpointError(f"cannot begin at {folder}: {error}") from error
    console.say(f"replaying from {folder}")
    return checkpoint.state


def _steps_of(run: Path, first: int, last: int) -> Iterator[list[Group]]:
    """Yield the groups that each step was trained on, in the order of its batch.

    Raises:
        ConfigError: If the records do not hold them.
    """
    step, groups = first, dict[int, Group]()
    for line, _ in lines_and_sizes(run / EPISODES_FILE, "step"):
        if line["step"] < first:
            continue
        while line["step"] > step:
            yield list(groups.values())
            step, groups = step + 1, {}
        if line["step"] > last:
            return
        _add(groups, line)
    while step <= last:
        yield list(groups.values())
        step, groups = step + 1, {}


def _add(groups: dict[int, Group], line: dict[str, Any]) -> None:
    about = line["group"]
    if about["decision"] != KEPT:
        return
    trajectory = Trajectory.from_record(line)
    group = groups.setdefault(
        about["place"], Group(about["index"], trajectory.task, about["admitted_version"], decision=KEPT)
    )
    group.trajectories.append(trajectory)
    if "greedy" in about:
        group.greedy = Trajectory.from_record(about["greedy"])


async def _take(opened: _Opened, groups: list[Group], step: int, version: int) -> None:
    pictures, known = opened.policy.renderer.pictures, opened.policy.vocabulary
    for segment in (each for group in groups for one in group.trajectories for each in one.segments):
        if segment.images and isinstance(pictures, PictureProcessor):
            segment.images = pictures.filled(segment.images)
        if (largest := max(segment.ids, default=0)) >= known:
            raise ConfigError(
                f"{EPISODES_FILE}: an episode of step {step} has the token id {largest}, and the model knows ids below "
                f"{known}: replay the records of a run with the model that it was made with"
            )
    await opened.learner.update(episode_batch(groups, opened.build_rows), step, version)
