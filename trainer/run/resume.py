"""Resumes a run, and keeps it apart from all others: its checkpoint, its directory and its settings."""

import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from rollgym.trainer.config.agents import agent_kind
from rollgym.trainer.config.load import dump_settings, load_own_settings, public_settings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import CheckpointError, ConfigError
from rollgym.trainer.core.run_files import CONFIG_FILE, has_ended, write_errors, write_whole
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.tracking import (
    BOARDS_FILE,
    METRICS_FILE,
    RECORD_FILES,
    TENSORBOARD_FOLDER,
    RunIdentity,
    Tracker,
    open_trackers,
)
from rollgym.trainer.records.checkpoint import Checkpoint, CheckpointStore, load_checkpoint
from rollgym.trainer.records.ledger import LEDGER_FILE
from rollgym.trainer.records.rollout_log import ROLLOUT_LOG_FOLDER
from rollgym.trainer.tasks.curriculum import CURRICULUM_FILE

_FREE_TO_CHANGE = (
    "steps",
    "output_dir",
    "env_url",
    "env_token",
    "checkpoint",
    "tracking",
    "evaluation",
    "name",
    "model.device",
    "model.gradient_checkpointing",
    "model.compile",
    "model.kernels",
    "optimizer.tokens_per_micro_batch",
    "optimizer.packed_rows",
    "optimizer.fused",
    "optimizer.shared_prefixes",
    "backend",
    "rollout.server_timeout_s",
    "rollout.episode_timeout_s",
    "rollout.max_failed_groups",
    "rollout.max_steps_without_learning",
    "rollout.max_concurrent_episodes",
    "rollout.max_concurrent_by_environment",
    "rollout.log",
    "optimizer.max_skipped_steps",
    "inference.urls",
    "inference.urls_file",
    "inference.launch",
    "inference.patience_s",
    "inference.lost_after_s",
    "inference.stalled_after_s",
    "inference.update_timeout_s",
    "inference.look_every_s",
    "inference.max_concurrent_requests",
    "inference.api_key_variable",
    "inference.admin_key_variable",
    "weights",
    "cluster",
    "threads",
    "tasks.*.url",
    "datasets.*.url",
    "datasets.*.rewards.*.url",
    "distill.teachers.*.url",
    "distill.teachers.*.api_key_variable",
    "distill.teachers.*.timeout_s",
    "agents.host",
    "agents.port",
    "agents.public_url",
    "agents.concurrency",
    "agents.grace_s",
    "agents.max_body_mb",
    "agents.sandbox_read_only",
    "agents.sandbox_memory_mb",
    "agents.sandbox_disk_mb",
)
"""Settings that a resumed run may change, with all below them: they do not affect what is learnt. A star is any key.

Among them: timeouts, the number of failures that end a run, and memory limits, since a user who resumes a run that
ended for such a reason changes just these. Also the addresses of servers, the placement of roles, and the transport of
weights: a run may resume with other servers, on other machines. Another machine may have another device, less memory
or more threads: sums are rounded differently there, and are the same sums.
"""

_MOST_NAMED = 8
"""Settings that a message names."""

_RECORDS = (*RECORD_FILES, LEDGER_FILE, BOARDS_FILE, CURRICULUM_FILE)


def find_checkpoint(
    settings: RunSettings, store: CheckpointStore, say: Callable[[str], None]
) -> Checkpoint | None:
    """Read the checkpoint to resume from, or return None to start from scratch.

    A directory belongs to a run from its first training step on; earlier contents are accepted.

    Args:
        settings: The run.
        store: The checkpoints of its directory.
        say: Called with a message for every checkpoint that is skipped.

    Raises:
        ConfigError: If the output directory holds another run, which this run would overwrite.
        CheckpointError: If the settings name a folder that is not a checkpoint, or all checkpoints are unreadable.
    """
    resume = settings.checkpoint.resume
    directory = Path(settings.output_dir)
    if resume == "auto":
        return _newest(settings, store, say)
    if resume == "never":
        if _holds_a_run(directory, store):
            raise ConfigError(
                f"output_dir {directory} holds a run already: checkpoint.resume=auto goes on with it, another "
                "output_dir starts anew"
            )
        _begin_anew(store, say)
        return None
    folder = Path(resume)
    checkpoint = load_checkpoint(folder)
    if not store.holds(folder):
        if _holds_a_run(directory, store):
            raise ConfigError(
                f"output_dir {directory} holds a run already, which {folder} is no checkpoint of; name another "
                "output_dir"
            )
        _begin_anew(store, say)
    return checkpoint


def _newest(settings: RunSettings, store: CheckpointStore, say: Callable[[str], None]) -> Checkpoint | None:
    directory = Path(settings.output_dir)
    if store.latest() is None and has_ended(directory):
        raise ConfigError(
            f"output_dir {directory} holds a finished run without checkpoints to go on from; "
            "another output_dir starts anew"
        )
    checkpoint = store.load_newest(say)
    if checkpoint is None:
        return None
    changed = changed_settings(settings, directory)
    if changed and not _holds_a_run(directory, store):
        say(f"{_named(changed)} differ from the settings of the warm start, and no step was trained since")
        _begin_anew(store, say)
        return None
    return checkpoint


def _begin_anew(store: CheckpointStore, say: Callable[[str], None]) -> None:
    """Set aside the warm start of a run that never took a step."""
    if store.latest() is not None:
        say("the warm start that an earlier run left here is set aside, and made again")
        store.set_all_aside()


def _holds_a_run(directory: Path, store: CheckpointStore) -> bool:
    return store.highest_step() > 0 or has_ended(directory) or has_trained(directory)


def has_trained(directory: Path) -> bool:
    """Whether the metrics tell of a training step; those of step 0 are measured before it."""
    path = directory / METRICS_FILE
    if not path.exists():
        return False
    # An unreadable line counts as a training step.
    return any(_step_of(line) != 0 for line in path.read_bytes().splitlines())


def _step_of(line: bytes) -> object:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def go_back(
    store: CheckpointStore, checkpoint: Checkpoint | None, directory: Path, say: Callable[[str], None]
) -> None:
    """Cut a directory's records at the run's checkpoint; without a checkpoint of its own, clear them."""
    if checkpoint is not None:
        say(f"resuming at step {checkpoint.state.step} from {checkpoint.folder}")
    if checkpoint is not None and store.holds(checkpoint.folder):
        store.go_back_to(checkpoint.folder, checkpoint.state.step)
    elif clear_records(directory):
        say(f"the run in {directory} left no checkpoint: it begins again, and its records with it")


async def restore_models(store: CheckpointStore, checkpoint: Checkpoint, models: Models) -> None:
    """Load a checkpoint's state into the models of a run, and save another run's as a checkpoint of its own.

    If a role or the process dies before the run's own first checkpoint, the run restarts from that one.

    Args:
        store: The checkpoints of its directory.
        checkpoint: The checkpoint that the run starts or resumes from.
        models: Its models.

    Raises:
        CheckpointError: If the state is not of such models.
        WriteError: If writing fails.
    """
    try:
        await asyncio.to_thread(models.load_state_dicts, checkpoint.parts)
    except ValueError as error:
        raise CheckpointError(f"cannot resume from {checkpoint.folder}: {error}") from error
    if not store.holds(checkpoint.folder):
        await run_shielded(asyncio.to_thread(lambda: store.save(checkpoint.state, models.state_dicts())))


def open_tracker(settings: RunSettings, step: int, say: Callable[[str], None]) -> Tracker:
    """Open what a run reports to, as it was when a step began; what was reported later is void.

    Args:
        settings: The run.
        step: The step that it begins or resumes with.
        say: Called with a message for each tracker that fails.
    """
    directory = Path(settings.output_dir)
    run = RunIdentity(directory, settings.name, public_settings(settings), step)
    boards = open_trackers(settings.tracking, run, say)
    return Tracker(directory, settings.tracking, step, boards, settings.checkpoint.best_metric, say)


def clear_records(directory: Path) -> bool:
    """Remove what a run wrote that ended before its first checkpoint, and return whether it had trained.

    Its tasks are played again from the first one on, by weights that have learnt nothing from it.

    Raises:
        WriteError: If that cannot be done.
    """
    found = has_trained(directory)
    with write_errors(directory):
        for name in _RECORDS:
            (directory / name).unlink(missing_ok=True)
        board = directory / TENSORBOARD_FOLDER
        if board.exists():
            shutil.rmtree(board)
    return found


def clear_rollout_log(settings: RunSettings, directory: Path, *, resuming: bool) -> None:
    """Remove the rollout log, unless this run resumes exactly where the logged one ended.

    That is so if it resumes from its newest checkpoint, or from its beginning if it was killed before it had one.
    A user who names a checkpoint goes back on purpose, and wants everything after it replayed from scratch.

    Args:
        settings: The run, whose settings are not written yet.
        directory: Its directory.
        resuming: Whether it resumes from a checkpoint.
    """
    goes_on = settings.checkpoint.resume == "auto" and (resuming or not changed_settings(settings, directory))
    folder = directory / ROLLOUT_LOG_FOLDER
    if folder.exists() and not goes_on:
        with write_errors(folder):
            shutil.rmtree(folder)


def keep_settings(settings: RunSettings, directory: Path, *, resuming: bool) -> None:
    """Write the resolved settings beside the run, or check that a resumed run has the same.

    Raises:
        CheckpointError: If a setting that touches what is learnt has changed.
        ConfigError: If the directory cannot be written.
    """
    if resuming and (changed := changed_settings(settings, directory)):
        why = ""
        if "steps" in changed and (schedule := settings.optimizer.schedule) != "constant":
            why = f" (the learning rate's {schedule} schedule ends at the last of the steps)"
        raise CheckpointError(
            f"cannot resume: {_named(changed)} differ from the settings of the run in {directory}{why}; use another "
            f"output_dir, or the settings it began with, which are in {directory / CONFIG_FILE}"
        )
    path = directory / CONFIG_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, dump_settings(settings))
    except OSError as error:
        raise ConfigError(
            f"cannot write to output_dir {directory}: {error.strerror}; name another output_dir"
        ) from error


def _named(changed: Sequence[str]) -> str:
    """Return the names of changed settings, as many as a message has room for."""
    more = len(changed) - _MOST_NAMED
    return ", ".join(changed[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def changed_settings(settings: RunSettings, directory: Path) -> list[str]:
    """The settings that touch what is learnt and differ from those of the run in `directory`."""
    path = directory / CONFIG_FILE
    if not path.exists():
        return []
    try:
        before = load_own_settings(path)
    except ConfigError as error:
        raise CheckpointError(
            f"cannot resume: {path} cannot be read, which holds the settings that the run began with: {error}"
        ) from error
    changes = _changes(before.model_dump(mode="json"), settings.model_dump(mode="json"))
    free = [key for key in _FREE_TO_CHANGE if key != "steps" or before.optimizer.schedule == "constant"]
    if _is_service(before) and _is_service(settings):
        free.append("rollout.agent")
    return [key for key in changes if not any(_is_below(key, each) for each in free)]


def _is_service(settings: RunSettings) -> bool:
    """Whether the agent is a service, which may move to another address."""
    agent = settings.rollout.agent
    return agent is not None and agent_kind(agent) == "service"


def _is_below(key: str, free: str) -> bool:
    """Whether a key is one of those that may change, or below it."""
    wanted, parts = free.split("."), key.split(".")
    return len(parts) >= len(wanted) and all(
        each in (part, "*") for part, each in zip(parts, wanted, strict=False)
    )


def _changes(before: object, now: object, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [
            change
            for key in keys
            for change in _changes(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = enumerate(zip(before, now, strict=True))
        return [
            change for index, (one, other) in pairs for change in _changes(one, other, f"{prefix}.{index}")
        ]
    return [] if before == now else [prefix]
