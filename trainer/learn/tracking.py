"""Outputs that a run reports to: metrics.jsonl, TensorBoard, other trackers, and every episode as text and ids.

Third-party trackers (Weights & Biases, SwanLab, MLflow) run in threads of their own, so a slow or dead server does not
block the run, and if one of them fails, the run continues. Records that one does not accept are counted and reported;
`metrics.jsonl` has all records.
"""

import json
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollgym.suggestions import did_you_mean
from rollgym.trainer.config.output import (
    MlflowSettings,
    SwanlabSettings,
    TrackingSettings,
    WandbSettings,
    current_metric,
)
from rollgym.trainer.core.plugins import load_attribute
from rollgym.trainer.core.run_files import LineFile, lines_and_sizes, read_lines, write_errors, write_whole
from rollgym.trainer.records.group import Group

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


BOARDS_FILE = "boards.json"
"""File that names the trackers' runs, so that a resumed run continues them."""
_MOST_WAITING = 10_000
_MLFLOW_NAME = re.compile(r"[^\w\-. :/]")
_MLFLOW_BATCH = 100
_MLFLOW_METRICS = 1000
_MLFLOW_LONGEST = 500

Numbers = Mapping[str, float]


class NotLoggedInError(Exception):
    """A tracker knows no user; the message has the remedy."""


class OpenTracker(Protocol):
    """A third-party tracker that is open for a run."""

    def log(self, step: int, values: Numbers) -> None:
        """Record finite numbers of a step."""
        ...

    def close(self) -> None:
        """Send what is left, and end."""
        ...


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """How a tracker identifies and describes a run.

    Attributes:
        directory: The run's directory.
        name: Its name, for people.
        config: Its settings, without secrets.
        step: The step that the run resumes from: trackers' records of later steps are void, and are sent again.
    """

    directory: Path
    name: str
    config: dict[str, Any]
    step: int
    _keeping: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def known(self, board: str) -> str | None:
        """Return what a tracker called this run when it began."""
        return self._ids().get(board)

    def keep(self, board: str, name: str) -> None:
        """Keep what a tracker calls this run, for processes that resume it."""
        path = self.directory / BOARDS_FILE
        with self._keeping, write_errors(path):  # trackers open in threads, at the same time
            write_whole(path, json.dumps(self._ids() | {board: name}))

    def _ids(self) -> dict[str, str]:
        try:
            ids = json.loads((self.directory / BOARDS_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}  # a new run, or a file that was cut off: the tracker then starts a second run
        return ids if isinstance(ids, dict) else {}


@dataclass(slots=True)
class ThreadedTracker:
    """Runs a tracker in a thread of its own, which catches, counts and reports whatever it raises.

    Attributes:
        name: The tracker's, for people.
        open_board: Opens it; called in the thread.
        say: Called at the first failure, and at the end with the number of records that were not accepted.
    """

    name: str
    open_board: Callable[[], OpenTracker]
    say: Callable[[str], None]
    _queue: queue.Queue[tuple[int, Numbers] | None] = field(
        default_factory=lambda: queue.Queue(maxsize=_MOST_WAITING)
    )
    _thread: threading.Thread = field(init=False)
    _given: int = 0
    _taken: int = 0
    _warned: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{self.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Numbers) -> None:
        """Queue a step's numbers for the tracker; never blocks."""
        self._given += 1
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._warn(f"it is {_MOST_WAITING} records behind")

    def close(self, patience_s: float) -> None:
        """Wait until everything is sent, at most so long, and tell what is not."""
        deadline = time.monotonic() + patience_s
        try:
            self._queue.put(None, timeout=patience_s)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass  # reported below, with the records that it did not accept
        if self._thread.is_alive():
            self._warn("it has not ended within the tracking.patience_s that it had")
        if (lost := self._given - self._taken) > 0:
            self.say(
                f"tracker {self.name}: {lost} of {self._given} records are missing there; metrics.jsonl has all"
            )

    def _serve(self) -> None:
        board: OpenTracker | None = None
        while (item := self._queue.get()) is not None:
            # Third-party code on the other end of a network: no failure of it may end the run.
            try:
                if board is None:
                    board = self.open_board()
                board.log(*item)
                self._taken += 1
            except Exception as error:  # noqa: BLE001 - reported, once
                self._warn(f"{type(error).__name__}: {error}")
        if board is not None:
            try:
                board.close()
            except Exception as error:  # noqa: BLE001 - reported, once
                self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            brief = " ".join(why.split())[:300]
            self.say(f"tracker {self.name} fails, and the run goes on without it: {brief}")


def open_trackers(
    settings: TrackingSettings, run: RunIdentity, say: Callable[[str], None]
) -> list[ThreadedTracker]:
    """Open the trackers that the settings name."""
    return [
        ThreadedTracker(each.name, partial(load_attribute(each.board), each, run), say)
        for each in settings.chosen
    ]


class OpenWandb:
    """Weights & Biases.

    Args:
        settings: Settings of the tracker.
        run: The run to report.
    """

    def __init__(self, settings: WandbSettings, run: RunIdentity) -> None:
        import wandb

        # It would ask the person at the terminal for a key, in the middle of the run's own console.
        if settings.mode == "online" and not wandb.login(prompt=False):
            raise NotLoggedInError(
                "run `wandb login`, set WANDB_API_KEY, or take tracking.wandb.mode=offline"
            )
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            name=run.name,
            config=run.config,
            dir=str(run.directory),
            id=run.known("wandb"),
            resume="allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        run.keep("wandb", self._run.id)
        # A resumed run goes back to its checkpoint, and wandb takes no step that is lower than one before it.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Numbers) -> None:
        """Record a step's numbers in the run."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run, which sends what is still queued."""
        self._run.finish()


class OpenSwanlab:
    """SwanLab.

    Args:
        settings: Settings of the tracker.
        run: The run to report.
    """

    def __init__(self, settings: SwanlabSettings, run: RunIdentity) -> None:
        import swanlab

        self._run = swanlab.init(
            project=settings.project,
            workspace=settings.workspace,
            group=settings.group,
            tags=settings.tags,
            mode=settings.mode,
            name=run.name,
            config=run.config,
            log_dir=str(run.directory / "swanlab"),
            id=run.known("swanlab"),
            resume="allow",
            settings=swanlab.Settings(interactive=False),
        )
        run.keep("swanlab", self._run.id)

    def log(self, step: int, values: Numbers) -> None:
        """Record a step's numbers in the run."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run, which sends what is still queued."""
        self._run.finish()


class OpenMlflow:
    """MLflow.

    Args:
        settings: Settings of the tracker.
        run: The run to report.
    """

    def __init__(self, settings: MlflowSettings, run: RunIdentity) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=settings.uri)
        known = run.known("mlflow")
        if known is None:
            experiment = self._client.get_experiment_by_name(settings.experiment)
            experiment_id = (
                self._client.create_experiment(settings.experiment)
                if experiment is None
                else experiment.experiment_id
            )
            self._run_id: str = self._client.create_run(experiment_id, run_name=run.name).info.run_id
            run.keep("mlflow", self._run_id)
            self._describe(run.config)
            return
        self._run_id = known
        history = self._history(known)
        if all(each.step <= run.step for each in history):
            self._client.update_run(known, status="RUNNING")
            return
        self._replace(run, [each for each in history if each.step <= run.step])

    def _history(self, run_id: str) -> list[Any]:
        names = self._client.get_run(run_id).data.metrics
        return [each for name in names for each in self._client.get_metric_history(run_id, name)]

    def _replace(self, run: RunIdentity, kept: list[Any]) -> None:
        """Continue in a copy of the run without the void steps: MLflow cannot delete a number."""
        old = self._run_id
        experiment_id = self._client.get_run(old).info.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        try:
            self._describe(run.config)
            self._send(kept)
        except BaseException:
            self._client.delete_run(self._run_id)  # it is tried again with the next record
            raise
        run.keep("mlflow", self._run_id)
        self._client.set_tag(self._run_id, "rollgym.goes_on_from", old)
        self._client.set_tag(old, "rollgym.goes_on_in", self._run_id)
        self._client.set_terminated(old, "KILLED")

    def _describe(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(_MLFLOW_NAME.sub("_", key)[:250], text[:_MLFLOW_LONGEST]) for key, text in flat(config)
        ]
        for start in range(0, len(params), _MLFLOW_BATCH):
            self._client.log_batch(self._run_id, params=params[start : start + _MLFLOW_BATCH])

    def log(self, step: int, values: Numbers) -> None:
        """Record a step's numbers in the run."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = [
            Metric(_MLFLOW_NAME.sub("_", name)[:250], value, now, step) for name, value in values.items()
        ]
        self._send(named)

    def _send(self, metrics: list[Any]) -> None:
        for start in range(0, len(metrics), _MLFLOW_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _MLFLOW_METRICS])

    def close(self) -> None:
        """Mark the run as finished on the server."""
        self._client.set_terminated(self._run_id)


def flat(config: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as dotted keys and texts."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(config, list) and any(isinstance(value, Mapping | list) for value in config):
        for index, value in enumerate(config):
            yield from flat(value, f"{prefix}.{index}")
    else:
        yield prefix, config if isinstance(config, str) else json.dumps(config)


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
        boards: Sequence[ThreadedTracker] = (),
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
        """Close all files, and wait a while for trackers that still send.

        Raises:
            WriteError: If the disk does not take what waits; the other files and the trackers are closed all the same.
        """
        with ExitStack() as stack:
            stack.callback(self._close_boards)
            if self._board is not None:
                stack.callback(self._close_tensorboard, self._board)
            for file in (self._metrics, self._episodes, self._digests):
                if file is not None:
                    stack.callback(file.close)

    def _close_tensorboard(self, board: "SummaryWriter") -> None:
        with self._without_board():
            board.close()

    def _close_boards(self) -> None:
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
