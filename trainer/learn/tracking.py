"""Outputs that a run reports to: metrics.jsonl, TensorBoard, other trackers, and every episode as text and ids."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.suggestions import did_you_mean
from rollgym.trainer.config.output import TrackingSettings, current_metric
from rollgym.trainer.core.run_files import LineFile, lines_and_sizes, read_lines, write_errors
from rollgym.trainer.learn.boards import GuardedBoard
from rollgym.trainer.records.group import Group

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE, EPISODES_FILE, DIGESTS_FILE = RECORD_FILES = (
    "metrics.jsonl",
    "episodes.jsonl",
    "digests.jsonl",
)
"""The files of a run's directory that grow by a line at a time."""
EVALUATION_PREFIX = "evaluate/"
"""Begins the names of all metrics of evaluations."""
TENSORBOARD_FOLDER = "tensorboard"
"""The folder of a run's directory that TensorBoard reads."""


class Tracker:
    """Writes a run's numbers and episodes below its directory.

    Args:
        directory: The run's directory.
        settings: Settings that enable trackers.
        resume_step: The step that the run begins with. What earlier processes wrote of it and later steps is void
            and cut; it will be written again.
        boards: Third-party trackers that receive the same records.
        watched: A metric whose values are kept by step, in `scores`.
        say: Called once if TensorBoard's files cannot be written.

    Attributes:
        scores: The values of the watched metric, those of earlier processes among them.
        names: All metrics that were recorded.
    """

    def __init__(
        self,
        directory: Path,
        settings: TrackingSettings,
        resume_step: int,
        boards: Sequence[GuardedBoard] = (),
        watched: str | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._say = say
        self._boards = boards
        self._patience_s = settings.patience_s
        directory.mkdir(parents=True, exist_ok=True)
        # Metrics are filed under the number of completed updates: those of step k under k + 1.
        self._metrics = _open_from(directory / METRICS_FILE, resume_step + 1)
        self._evaluated = _evaluated_steps(directory / METRICS_FILE)
        self._watched = watched
        self.scores: dict[int, float] = {}
        self.names: set[str] = set()
        if watched is not None:
            for line in read_lines(directory / METRICS_FILE, "step"):
                self._note(line["step"], {current_metric(name): value for name, value in line.items()})
        self._episodes = _open_from(directory / EPISODES_FILE, resume_step) if settings.episodes else None
        self._digests = _open_from(directory / DIGESTS_FILE, resume_step) if settings.digests else None
        self._board: SummaryWriter | None = None
        if settings.tensorboard:
            from torch.utils import tensorboard  # Imported late: it takes seconds.

            with self._without_board():
                self._board = tensorboard.SummaryWriter(
                    str(directory / TENSORBOARD_FOLDER), purge_step=resume_step + 1
                )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of a step; one that is not finite is null, since JSON has no name for it."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._metrics.write({"step": step, **dict.fromkeys(values), **finite})
        self._note(step, finite)
        self._metrics.flush()
        if self._board is not None:
            with self._without_board():
                for name, value in finite.items():
                    self._board.add_scalar(name, value, step)
        for board in self._boards if finite else ():  # some trackers take nothing for a mistake
            board.log(step, finite)

    @contextmanager
    def _without_board(self) -> Iterator[None]:
        """Continue without TensorBoard if its files cannot be written; its writer thread raises at a later call."""
        try:
            yield
        except OSError as error:
            self._board = None
            self._say(f"tracker tensorboard fails, and the run goes on without it: {error}")

    def _note(self, step: int, values: Mapping[str, Any]) -> None:
        self.names.update(values)
        value = values.get(self._watched or "")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self.scores[step] = float(value)

    def episodes(self, step: int, groups: Iterable[Group]) -> None:
        """Record the episodes of the groups that a step trained on or dropped, in the order of its batch."""
        if self._episodes is not None:
            for index, group in enumerate(groups):
                about = group.as_record(index)
                # It is not one of the trained episodes, and belongs to the whole group: it is written once.
                beside: dict[str, Any] = {} if group.greedy is None else {"greedy": group.greedy.as_record()}
                for number, trajectory in enumerate(group.trajectories):
                    told = about if number else about | beside
                    self._episodes.write({"step": step, "group": told, **trajectory.as_record()})

    def digest(self, step: int, values: Mapping[str, str]) -> None:
        """Record digests of a step, for comparing two runs."""
        if self._digests is not None:
            self._digests.write({"step": step, **values})
            self._digests.flush()

    def unmeasured(self) -> str | None:
        """Return a warning if no measurement has the metric that selects checkpoints; else None."""
        named = self._watched
        if named is None or named in self.names:
            return None
        hint = did_you_mean(named, self.names, 3) or "metrics.jsonl has the names"
        return (
            f"checkpoint.best_metric: this run does not measure '{named}', "
            f"so checkpoints are kept by age alone; {hint}"
        )

    def evaluated(self, step: int) -> bool:
        """Whether earlier processes of the run recorded an evaluation after `step` training steps."""
        return step in self._evaluated

    @property
    def wants_digests(self) -> bool:
        """Whether this run records digests."""
        return self._digests is not None

    def flush(self) -> None:
        """Bring what was written to the operating system."""
        for file in (self._metrics, self._episodes, self._digests):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Close all files, and wait a while for trackers that still send."""
        for file in (self._metrics, self._episodes, self._digests):
            if file is not None:
                file.close()
        if self._board is not None:
            with self._without_board():
                self._board.close()
        deadline = time.monotonic() + self._patience_s
        for board in self._boards:
            board.close(max(0.0, deadline - time.monotonic()))


def _evaluated_steps(path: Path) -> set[int]:
    return {
        line["step"]
        for line in read_lines(path, "step")
        if any(name.startswith(EVALUATION_PREFIX) for name in line)
    }


def _open_from(path: Path, step: int) -> LineFile:
    """Open `path` for appending, cut off at the first line of `step` or later."""
    file = LineFile(path)
    kept = 0
    with write_errors(path):
        for line, size in lines_and_sizes(path, "step"):
            if line["step"] >= step:
                break
            kept += size
        os.truncate(path, kept)
    return file
