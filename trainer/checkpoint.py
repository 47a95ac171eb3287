"""Checkpoints: atomic, checked by hashes, and enough to go on exactly.

A checkpoint holds the model, the optimizers, the step, the policy version and the data cursor at the *trained*
frontier: tasks that were admitted and not yet trained are issued again. There is no generator state to keep, because
every random number is drawn from a stream that is named by what it is for.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.errors import TrainerError

_MANIFEST = "manifest.json"
_STATE = "state.json"
_LATEST = "latest"
_STEP = "step_"
_ASIDE = "aside_"


class CheckpointError(TrainerError):
    """A checkpoint is missing or damaged, or belongs to another run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands.

    Attributes:
        step: The next training step.
        version: Policy version; counts weight updates and never goes back within a run's lineage.
        next_task: First task of the stream that was never admitted.
        untrained: Tasks admitted and not trained; they are issued again.
    """

    step: int
    version: int
    next_task: int
    untrained: tuple[int, ...]


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: Where they are kept, one folder each.
        keep: How many of the newest stay.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._keep = keep

    def save(self, state: RunState, parts: dict[str, Any]) -> Path:
        """Write a checkpoint: whole or not at all.

        Args:
            state: Where the run stands.
            parts: State dictionaries by name, such as `policy` and `critic`.

        Returns:
            Its folder.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        name = f"{_STEP}{state.step:06d}"
        scratch = self._directory / f".{name}.partial"
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
        for part, content in parts.items():
            torch.save(content, scratch / f"{part}.pt")
        (scratch / _STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
        hashes = {file.name: _hash(file) for file in sorted(scratch.iterdir())}
        (scratch / _MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
        for file in scratch.iterdir():
            _sync(file)
        final = self._directory / name
        # `latest` may point at a checkpoint of this step: it goes only once the new one can take its place.
        replaced = self._directory / f".{name}.replaced"
        if final.exists():
            final.rename(replaced)
        scratch.rename(final)
        self._point_at(final)
        if replaced.exists():
            shutil.rmtree(replaced)
        self._remove_old(state.step)
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None if there is none yet."""
        pointer = self._directory / _LATEST
        if not pointer.exists():
            return None
        return self._directory / pointer.read_text(encoding="utf-8").strip()

    def holds(self, folder: Path) -> bool:
        """Whether `folder` is one of these checkpoints."""
        return folder.resolve().parent == self._directory.resolve()

    def go_back_to(self, folder: Path, step: int) -> None:
        """Make the checkpoint of step `step` the newest; later ones are kept under names that nothing reads."""
        for later, other in self._steps().items():
            if later > step:
                aside = self._directory / f"{_ASIDE}{other.name}"
                if aside.exists():
                    shutil.rmtree(aside)
                other.rename(aside)
        self._point_at(folder)

    def _point_at(self, folder: Path) -> None:
        _sync(self._directory)
        pointer = self._directory / f".{_LATEST}.partial"
        pointer.write_text(folder.name, encoding="utf-8")
        _sync(pointer)
        pointer.rename(self._directory / _LATEST)

    def _remove_old(self, newest: int) -> None:
        """Keep the checkpoint of step `newest` and those next below it; nothing above it is touched."""
        older = sorted(
            ((step, folder) for step, folder in self._steps().items() if step < newest), reverse=True
        )
        for _, folder in older[self._keep - 1 :]:
            shutil.rmtree(folder)

    def _steps(self) -> dict[int, Path]:
        found = {folder: _step_of(folder) for folder in self._directory.glob(f"{_STEP}*")}
        return {step: folder for folder, step in found.items() if step is not None}


def load_checkpoint(folder: Path) -> tuple[RunState, dict[str, Any]]:
    """Read a checkpoint and check it against its manifest.

    Raises:
        CheckpointError: If a file is missing or differs from what was written.
    """
    manifest = folder / _MANIFEST
    if not manifest.exists():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {_MANIFEST}")
    for name, digest in json.loads(manifest.read_text(encoding="utf-8")).items():
        file = folder / name
        if not file.exists() or _hash(file) != digest:
            raise CheckpointError(f"{file} is damaged or missing; resume from an older checkpoint")
    raw = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    state = RunState(raw["step"], raw["version"], raw["next_task"], tuple(raw["untrained"]))
    parts = {file.stem: torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pt"))}
    return state, parts


def _step_of(folder: Path) -> int | None:
    number = folder.name.removeprefix(_STEP)
    return int(number) if number.isdecimal() else None


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
