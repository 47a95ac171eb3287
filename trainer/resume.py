"""Where a run goes on, and that it never mixes with another one: its checkpoint, its directory and its settings."""

import shutil
from pathlib import Path

from trainer.checkpoint import CheckpointError, CheckpointStore
from trainer.config.load import dump_settings, load_settings
from trainer.config.run import RunSettings
from trainer.errors import ConfigError
from trainer.ledger import LEDGER_FILE
from trainer.tracking import RECORD_FILES, TENSORBOARD_FOLDER

_FREE_TO_CHANGE = (
    "steps",
    "output_dir",
    "env_url",
    "env_token",
    "checkpoint",
    "tracking",
    "evaluation",
    "name",
)
"""Settings that a resumed run may change: they do not touch what is learnt."""

_RECORDS = (*RECORD_FILES, LEDGER_FILE)


def resume_folder(settings: RunSettings, store: CheckpointStore) -> Path | None:
    """Return the checkpoint to go on from, or None to begin anew.

    Raises:
        ConfigError: If the output directory holds another run, which this one would write into.
        CheckpointError: If the settings name a folder that is not there.
    """
    resume = settings.checkpoint.resume
    directory = Path(settings.output_dir)
    if resume == "auto":
        newest = store.latest()
        if newest is None and (directory / "model").exists():
            raise ConfigError(
                f"output_dir {directory} holds a finished run without checkpoints to go on from; "
                "another output_dir starts anew"
            )
        return newest
    if resume == "never":
        if _holds_a_run(directory, store):
            raise ConfigError(
                f"output_dir {directory} holds a run already: checkpoint.resume=auto goes on with it, another "
                "output_dir starts anew"
            )
        return None
    folder = Path(resume)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint.resume: there is no folder {folder}")
    if _holds_a_run(directory, store) and not store.holds(folder):
        raise ConfigError(
            f"output_dir {directory} holds a run already, which {folder} is no checkpoint of; name another output_dir"
        )
    return folder


def _holds_a_run(directory: Path, store: CheckpointStore) -> bool:
    return store.latest() is not None or (directory / "model").exists() or _has_records(directory)


def _has_records(directory: Path) -> bool:
    # A run that stopped at its first request leaves empty files.
    return any((directory / name).exists() and (directory / name).stat().st_size for name in _RECORDS)


def clear_records(directory: Path) -> bool:
    """Remove what a run wrote that ended before its first checkpoint, and return whether there was anything.

    Its tasks are played again from the first one on, by weights that have learnt nothing from it.
    """
    found = _has_records(directory)
    for name in _RECORDS:
        (directory / name).unlink(missing_ok=True)
    board = directory / TENSORBOARD_FOLDER
    if board.exists():
        shutil.rmtree(board)
    return found


def keep_settings(settings: RunSettings, directory: Path, *, resuming: bool) -> None:
    """Write the resolved settings beside the run, or check that a resumed run has the same.

    Raises:
        CheckpointError: If a setting that touches what is learnt has changed.
        ConfigError: If the directory cannot be written.
    """
    path = directory / "config.yaml"
    if resuming and path.exists():
        before = load_settings(path)
        changes = _changes(before.model_dump(mode="json"), settings.model_dump(mode="json"))
        free = [key for key in _FREE_TO_CHANGE if key != "steps" or before.optimizer.schedule == "constant"]
        changed = [key for key in changes if key.split(".")[0] not in free]
        if changed:
            why = ""
            if "steps" in changed:
                why = f" (the learning rate's {before.optimizer.schedule} schedule ends at the last of the steps)"
            raise CheckpointError(
                f"cannot resume: {', '.join(changed)} differ from the settings of the run in {directory}{why}; use "
                "another output_dir, or the settings it began with"
            )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_settings(settings), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write to output_dir {directory}: {error.strerror}; name another output_dir"
        ) from error


def _changes(before: object, now: object, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [
            change
            for key in keys
            for change in _changes(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if before == now else [prefix]
