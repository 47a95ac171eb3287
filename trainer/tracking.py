"""Where a run reports to: metrics.jsonl, TensorBoard, and every episode as text and ids."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trainer.config.run import TrackingSettings
from trainer.ledger import cut_torn_line
from trainer.records import Trajectory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_METRICS, _EPISODES, _DIGESTS = RECORD_FILES = ("metrics.jsonl", "episodes.jsonl", "digests.jsonl")
"""The files of a run's directory that grow by a line at a time."""
TENSORBOARD_FOLDER = "tensorboard"
"""The folder of a run's directory that TensorBoard reads."""


class Tracker:
    """Writes a run's numbers and episodes below its directory.

    Args:
        directory: The run's directory.
        settings: Which trackers are on.
        resume_step: The step that the run begins with. What earlier processes wrote of it and later steps is void
            and cut; it will be written again.
    """

    def __init__(self, directory: Path, settings: TrackingSettings, resume_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # Metrics are filed under the number of updates behind them: those of step k under k + 1.
        self._metrics = _open_from(directory / _METRICS, resume_step + 1 if resume_step else 0)
        self._episodes = _open_from(directory / _EPISODES, resume_step) if settings.episodes else None
        self._digests = _open_from(directory / _DIGESTS, resume_step) if settings.digests else None
        self._board: SummaryWriter | None = None
        if settings.tensorboard:
            from torch.utils import tensorboard  # Imported late: it takes seconds.

            self._board = tensorboard.SummaryWriter(
                str(directory / TENSORBOARD_FOLDER), purge_step=resume_step
            )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers of a step; one that is not finite is null, since JSON has no name for it."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._metrics.write(json.dumps({"step": step, **dict.fromkeys(values), **finite}) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in finite.items():
                self._board.add_scalar(name, value, step)

    def episodes(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """Record the episodes that a step trained on or dropped."""
        if self._episodes is not None:
            for trajectory in trajectories:
                line = {"step": step, **trajectory.as_text()}
                self._episodes.write(json.dumps(line, ensure_ascii=False) + "\n")

    def digest(self, step: int, values: Mapping[str, str]) -> None:
        """Record digests of a step, for comparing two runs."""
        if self._digests is not None:
            self._digests.write(json.dumps({"step": step, **values}) + "\n")
            self._digests.flush()

    @property
    def wants_digests(self) -> bool:
        """Whether digests are recorded."""
        return self._digests is not None

    def flush(self) -> None:
        """Bring what was written to the operating system."""
        for file in (self._metrics, self._episodes, self._digests):
            if file is not None:
                file.flush()

    def close(self) -> None:
        """Close all files."""
        for file in (self._metrics, self._episodes, self._digests):
            if file is not None:
                file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _open_from(path: Path, step: int) -> TextIO:
    """Open `path` for appending, with all lines of `step` and later cut off."""
    if path.exists():
        cut_torn_line(path)
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] < step]
        if len(kept) < len(lines):
            path.write_text("".join(kept), encoding="utf-8")
    return path.open("a", encoding="utf-8")
