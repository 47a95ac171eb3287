"""Checkpoints of a run: folders that are verified by hashes and suffice to resume exactly; written whole or not at all.

A checkpoint holds the model, the optimizers, the step, the policy version and the data cursor at the *trained*
frontier: tasks that were admitted and not yet trained are issued again. No generator state is kept, because
every random number is drawn from a stream that is named by what it is for.

A process may be killed at any moment. A checkpoint is written beside the others under a name that nothing reads, and
takes its own name when all of it is on disk; one of the same step that it replaces steps aside first, and stands in for
it until then. So there is a whole checkpoint at every moment after the first one was written.
"""

import hashlib
import json
import math
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

import torch

from rollgym.trainer.core.errors import CheckpointError
from rollgym.trainer.core.run_files import sync_to_disk, write_errors
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


def _have_parts_written(folder: Path, parts: Mapping[str, Any]) -> None:
    """Write those parts of a checkpoint that write themselves, in their present state.

    Raises:
        OSError: If the disk does not take one of them.
    """
    for name, content in _writing_themselves(parts).items():
        (folder / name).mkdir()
        content.write(folder / name)


def _write_rest(folder: Path, state: RunState, parts: Mapping[str, Any]) -> None:
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


_LATEST = "latest"
_STEP = "step_"
_ASIDE = "aside_"

Best = Literal["highest", "lowest"]
"""Which scores are the best."""


class CheckpointStore:
    """The checkpoints of one run. One process writes them, any may read them.

    Args:
        directory: Its folders are the checkpoints.
        keep: Number of the newest to keep.
        keep_best: Number of those with the best scores to keep as well.
        best_is: Whether the best score is the highest or the lowest.
    """

    def __init__(
        self,
        directory: Path,
        keep: int,
        keep_best: int = 0,
        best_is: Best = "highest",
    ) -> None:
        self._directory = directory
        self._keep = keep
        self._keep_best = keep_best
        self._best_is = best_is

    def save(self, state: RunState, parts: dict[str, Any], scores: Mapping[int, float] = {}) -> Path:
        """Write a checkpoint: whole or not at all.

        Args:
            state: The run's progress.
            parts: State dictionaries by name, such as `policy` and `critic`, or what writes a part itself.
            scores: Scores that select checkpoints, by step; one without a score is kept for its age alone.

        Returns:
            Its folder.

        Raises:
            WriteError: If the disk is full, or does not take it for another reason. Older checkpoints stay.
        """
        return self.finish(self.begin(state, parts), state, parts, scores)

    def begin(self, state: RunState, parts: dict[str, Any]) -> Path:
        """Begin a checkpoint: write the parts that write themselves, in their present state.

        Nothing reads what is begun until `finish` is done with it, and the next one to be begun replaces it.

        Args:
            state: The run's progress.
            parts: As `save` takes them.

        Returns:
            The folder, for `finish`.

        Raises:
            WriteError: If the disk does not take it.
        """
        scratch = _scratch(self._directory / _name(state.step))
        with _wholly(scratch):
            scratch.parent.mkdir(parents=True, exist_ok=True)
            _remove(scratch)
            scratch.mkdir()
            _have_parts_written(scratch, parts)
        return scratch

    def finish(
        self, scratch: Path, state: RunState, parts: dict[str, Any], scores: Mapping[int, float] = {}
    ) -> Path:
        """Write the rest of a checkpoint, and give it its name; arguments and errors are those of `save`.

        Args:
            scratch: The folder that `begin` returned.
            state: The run's progress.
            parts: State dictionaries by name; those that wrote themselves are skipped.
            scores: Scores that select checkpoints.
        """
        final = self._directory / _name(state.step)
        with _wholly(scratch):
            _write_rest(scratch, state, parts)
        with write_errors(self._directory):
            self._take_place(scratch, final)
            self._remove_old(state.step, scores)
        return final

    def drop(self, scratch: Path) -> None:
        """Delete a checkpoint that was begun and will not be finished."""
        _remove(scratch)

    def latest(self) -> Path | None:
        """The newest checkpoint, or None if there is none yet."""
        return next(iter(self._candidates()), None)

    def newest_until(self, step: int) -> Path | None:
        """The newest checkpoint at or before a step; None if there is none."""
        found = self._steps()
        return found[max(kept)] if (kept := [each for each in found if each <= step]) else None

    def highest_step(self) -> int:
        """The highest step of a checkpoint, sound or not; 0 if there is none."""
        return max(self._steps(), default=0)

    def load_newest(self, say: Callable[[str], None]) -> Checkpoint | None:
        """Read the newest checkpoint that is whole, or return None if there is none yet.

        Args:
            say: Called with a message for every newer one that is damaged.

        Raises:
            CheckpointError: If there are checkpoints and none of them can be read.
        """
        candidates = self._candidates()
        problems: list[str] = []
        pointed = self._pointed_step()
        if pointed is not None and pointed not in self._steps():
            problems.append(f"{self._directory / _name(pointed)} is missing")
            say(f"passing over a checkpoint: {problems[0]}")
        for folder in candidates:
            try:
                checkpoint = load_checkpoint(folder)
            except CheckpointError as error:
                problems.append(str(error))
                say(f"passing over a damaged checkpoint: {error}")
            else:
                return checkpoint
        if problems or self._steps():
            raise CheckpointError(
                f"no checkpoint in {self._directory} can be read ({'; '.join(problems)}): bring one back from a "
                "copy, or begin again in another output_dir"
            )
        return None

    def holds(self, folder: Path) -> bool:
        """Whether `folder` is one of these checkpoints."""
        return folder.resolve().parent == self._directory.resolve()

    def go_back_to(self, folder: Path, step: int) -> None:
        """Make the checkpoint of step `step` the newest; later ones are kept under names that nothing reads.

        Raises:
            WriteError: If the disk does not take it.
        """
        with write_errors(self._directory):
            if self._pointed_step() != step:
                self._point_at(folder)
            for later, other in self._steps().items():
                if later > step:
                    self._set_aside(other)

    def set_all_aside(self) -> None:
        """Rename all checkpoints to names that are not read: a run starts from scratch beside them.

        Raises:
            WriteError: If the renaming fails.
        """
        with write_errors(self._directory):
            (self._directory / _LATEST).unlink(missing_ok=True)
            for folder in self._steps().values():
                self._set_aside(folder)

    def _set_aside(self, folder: Path) -> None:
        aside = self._directory / f"{_ASIDE}{_plain_name(folder)}"
        _remove(aside)
        folder.rename(aside)

    def _candidates(self) -> list[Path]:
        """The folders that may hold the newest checkpoint: the one that is pointed at, then those before it."""
        steps = self._steps()
        newest = self._pointed_step()
        return [steps[step] for step in sorted(steps, reverse=True) if newest is None or step <= newest]

    def _pointed_step(self) -> int | None:
        """The step that the pointer names; None if there is none, or it is unreadable."""
        try:
            name = (self._directory / _LATEST).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        return _step_of(name.strip())

    def _take_place(self, scratch: Path, final: Path) -> None:
        """Give a whole checkpoint its name. One of the same step stands in for it (see `_steps`) until it has it."""
        replaced = _replaced(final)
        if final.exists():
            _remove(replaced)
            final.rename(replaced)
        scratch.rename(final)
        self._point_at(final)
        _remove(replaced)

    def _point_at(self, folder: Path) -> None:
        sync_to_disk(self._directory)
        pointer = self._directory / f".{_LATEST}.partial"
        pointer.write_text(_plain_name(folder), encoding="utf-8")
        sync_to_disk(pointer)
        pointer.rename(self._directory / _LATEST)
        sync_to_disk(self._directory)

    def _remove_old(self, newest: int, scores: Mapping[int, float]) -> None:
        """Keep the checkpoint of step `newest`, those next below it and the best; nothing above it is touched."""
        steps = self._steps()
        below = [step for step in steps if step <= newest]
        for step in set(below) - kept_steps(below, scores, self._keep, self._keep_best, self._best_is):
            _remove(steps[step])
        kept = set(self._steps().values())
        for leftover in self._directory.glob(f".{_STEP}*"):  # of processes that were killed
            if leftover not in kept:
                _remove(leftover)

    def _steps(self) -> dict[int, Path]:
        """All checkpoints by step; one that was about to be replaced when its process was killed is among them."""
        stand_ins = {
            step: folder
            for folder in self._directory.glob(f".{_STEP}*.replaced")
            if (step := _step_of(_plain_name(folder))) is not None
        }
        named = {
            step: folder
            for folder in self._directory.glob(f"{_STEP}*")
            if (step := _step_of(folder.name)) is not None
        }
        return stand_ins | named


def kept_steps(
    steps: Iterable[int], scores: Mapping[int, float], keep: int, keep_best: int, best_is: Best
) -> set[int]:
    """Return which checkpoints stay: the newest, and those with the best scores. Pure.

    Args:
        steps: The steps of all that there are.
        scores: Their scores, as far as they have one; a non-finite score does not count.
        keep: Number of the newest to keep.
        keep_best: Number of the best to keep; of equal ones the newest.
        best_is: Whether high or low scores are the best.
    """
    newest = sorted(steps, reverse=True)
    sign = 1.0 if best_is == "highest" else -1.0
    scored = [step for step in newest if math.isfinite(scores.get(step, math.nan))]
    best = sorted(scored, key=lambda step: (sign * scores[step], step), reverse=True)
    return {*newest[:keep], *best[:keep_best]}


@contextmanager
def _wholly(scratch: Path) -> Iterator[None]:
    """Remove what is only half there: it is of no use, and takes room on a full disk."""
    try:
        with write_errors(scratch):
            yield
    except BaseException:
        _remove(scratch)
        raise


def _name(step: int) -> str:
    return f"{_STEP}{step:06d}"


def _scratch(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _replaced(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def _plain_name(folder: Path) -> str:
    """The name of a checkpoint, also of one that stands in for another."""
    return folder.name.removeprefix(".").removesuffix(".replaced")


def _step_of(name: str) -> int | None:
    """The step in a checkpoint's name; None if it is not the name of one."""
    number = name.removeprefix(_STEP)
    return int(number) if number != name and number.isdecimal() and number.isascii() else None


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
