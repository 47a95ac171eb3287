"""The checkpoints of a run: written whole or not at all, and few.

A process may be killed at any moment. A checkpoint is written beside the others under a name that nothing reads, and
takes its own name when all of it is on disk; one of the same step that it replaces steps aside first, and stands in for
it until then. So there is a whole checkpoint at every moment after the first one was written.
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rollgym.trainer.core.errors import CheckpointError
from rollgym.trainer.core.run_files import sync_to_disk, write_errors
from rollgym.trainer.records.checkpoint import (
    Checkpoint,
    RunState,
    have_parts_written,
    load_checkpoint,
    write_rest,
)

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
            have_parts_written(scratch, parts)
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
            write_rest(scratch, state, parts)
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
