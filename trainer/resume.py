"""Where a run goes on: which checkpoint, and whether its settings are still those it began with."""

from pathlib import Path

from trainer.checkpoint import CheckpointError, CheckpointStore
from trainer.config.load import dump_settings, load_settings
from trainer.config.run import RunSettings

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


def resume_folder(settings: RunSettings, store: CheckpointStore) -> Path | None:
    """Return the checkpoint to go on from, or None to begin anew.

    Raises:
        CheckpointError: If the settings name a folder that is not there.
    """
    resume = settings.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        return store.latest()
    folder = Path(resume)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint.resume: there is no folder {folder}")
    return folder


def keep_settings(settings: RunSettings, directory: Path, *, resuming: bool) -> None:
    """Write the resolved settings beside the run, or check that a resumed run has the same.

    Raises:
        CheckpointError: If a setting that touches what is learnt has changed.
    """
    path = directory / "config.yaml"
    if resuming and path.exists():
        before = load_settings(path).model_dump(mode="json")
        now = settings.model_dump(mode="json")
        changed = [key for key in _changes(before, now) if key.split(".")[0] not in _FREE_TO_CHANGE]
        if changed:
            raise CheckpointError(
                f"cannot resume: {', '.join(changed)} differ from the settings of the run in {directory}; use another "
                "output_dir, or the settings it began with"
            )
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_settings(settings), encoding="utf-8")


def _changes(before: object, now: object, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [
            change
            for key in keys
            for change in _changes(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if before == now else [prefix]
