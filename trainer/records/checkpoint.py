"""A checkpoint: a folder that is verified by hashes, and suffices to resume exactly.

A checkpoint holds the model, the optimizers, the step, the policy version and the data cursor at the *trained*
frontier: tasks that were admitted and not yet trained are issued again. No generator state is kept, because
every random number is drawn from a stream that is named by what it is for.
"""

import hashlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any

import torch

from rollgym.trainer.core.errors import CheckpointError
from rollgym.trainer.core.run_files import sync_to_disk
from rollgym.trainer.records.pieces import InPieces, SavedPieces

MANIFEST = "manifest.json"
"""The file of a checkpoint that is written last: the digests of all others."""
_STATE = "state.json"
_PART = ".pt"


@dataclass(frozen=True, slots=True)
class RunState:
    """A run's progress.

    Attributes:
        step: The next training step.
        version: Policy version; counts weight updates and never goes back within a run's lineage.
        next_task: First task of the stream that was never admitted.
        untrained: Tasks admitted and not trained; they are issued again.
        aside: Those of them that were put aside and wait for a long round; see `AdmissionWindow`.
        long_round: Those of them that are of a long round that has begun.
    """

    step: int
    version: int
    next_task: int
    untrained: tuple[int, ...]
    aside: tuple[int, ...] = ()
    long_round: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and found whole.

    Attributes:
        folder: The checkpoint's folder.
        state: The run's progress.
        parts: State dictionaries by name, such as `policy` and `critic`; for a part that ranks wrote, its folder.
    """

    folder: Path
    state: RunState
    parts: dict[str, Any]


def have_parts_written(folder: Path, parts: Mapping[str, Any]) -> None:
    """Write those parts of a checkpoint that write themselves, in their present state.

    Raises:
        OSError: If the disk does not take one of them.
    """
    for name, content in _writing_themselves(parts).items():
        (folder / name).mkdir()
        content.write(folder / name)


def write_rest(folder: Path, state: RunState, parts: Mapping[str, Any]) -> None:
    """Write all else of a checkpoint, its manifest last, and bring it to the disk.

    Raises:
        OSError: If the disk does not take it.
    """
    for part in parts.keys() - _writing_themselves(parts).keys():
        with (folder / f"{part}{_PART}").open("wb") as file:
            torch.save(parts[part], file)
    (folder / _STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    inside = sorted(folder.rglob("*"))
    hashes = {file.relative_to(folder).as_posix(): _hash(file) for file in inside if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
    for path in [*inside, folder / MANIFEST, folder]:
        sync_to_disk(path)


def _writing_themselves(parts: Mapping[str, Any]) -> dict[str, InPieces]:
    return {name: content for name, content in parts.items() if not isinstance(content, Mapping)}


def identity_of(folder: Path) -> str | None:
    """Return a checkpoint's unique identity, also among those of one step; None if it has no manifest."""
    manifest = folder / MANIFEST
    return _hash(manifest) if manifest.exists() else None


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint and check it against its manifest.

    Raises:
        CheckpointError: If a file is missing, differs from what was written, or cannot be understood.
    """
    try:
        names = _checked_names(folder)
        state = _read_state(folder / _STATE)
        parts: dict[str, Any] = {
            name.removesuffix(_PART): _read_part(folder / name)
            for name in sorted(names)
            if name.endswith(_PART) and "/" not in name
        }
        in_folders = {name.partition("/")[0] for name in names if "/" in name}
        parts |= {name: SavedPieces(folder / name) for name in sorted(in_folders)}
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename or folder}: {error.strerror}") from error
    return Checkpoint(folder, state, parts)


def _checked_names(folder: Path) -> set[str]:
    """Return the names of a checkpoint's files, each of which is there and as it was written."""
    manifest = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    if not manifest.exists():
        raise CheckpointError(f"{folder} is no checkpoint: it has no {MANIFEST}")
    hashes = _read_json(manifest)
    if not isinstance(hashes, dict) or _STATE not in hashes:
        raise CheckpointError(f"{manifest} is damaged: it does not list {_STATE}")
    for name, digest in hashes.items():
        file = folder / name
        # A part that ranks wrote is a folder of files; nothing is deeper, or elsewhere.
        steps = PurePath(name).parts
        ours = len(steps) in (1, 2) and ".." not in steps and not PurePath(name).is_absolute()
        if not ours or not file.is_file() or _hash(file) != digest:
            raise CheckpointError(f"{file} is damaged or missing")
    return set(hashes)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from error


def _read_state(path: Path) -> RunState:
    raw = _read_json(path)
    try:
        aside, long_round = raw.get("aside", []), raw.get("long_round", [])  # an older release wrote neither
        numbers = [raw["step"], raw["version"], raw["next_task"], *raw["untrained"], *aside, *long_round]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("a number is none")
        return RunState(
            raw["step"],
            raw["version"],
            raw["next_task"],
            tuple(raw["untrained"]),
            tuple(aside),
            tuple(long_round),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say where the run stands") from error


def _read_part(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}") from error


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()
