"""Reads a run's directory, while the run may still write to it: unreadable parts are noted, never fatal."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollgym.clients.evaluation.results_folder import SUMMARY_FILE
from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.trainer.config.load import without_secrets
from rollgym.trainer.core.errors import TrainerError
from rollgym.trainer.core.run_files import CONFIG_FILE, LOCK_FILE, has_ended
from rollgym.trainer.learn.tracking import EPISODES_FILE, METRICS_FILE
from rollgym.trainer.records.ledger import LEDGER_FILE, TaskEvent
from rollgym.trainer.records.trajectory import Trajectory

LONGEST_LINE = 8 * 2**20
"""Longest line that is read, in bytes: a larger episode is skipped."""
_MOST_ROWS = 4_000
_PLACES = 24
_NEIGHBOURS = 4

Row = dict[str, Any]


class NoRunError(TrainerError):
    """The directory does not contain a run."""


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode of the records.

    Attributes:
        step: The step that it was trained in, or dropped.
        decision: The filter's decision on its group: "kept", or why it was dropped.
        trajectory: The episode.
    """

    step: int
    decision: str
    trajectory: Trajectory


@dataclass(slots=True)
class RunFolder:
    """The data of a run's directory.

    Attributes:
        directory: The run's directory.
        settings: Its settings without secrets, as nested data; empty if they cannot be read.
        training: Lines of metrics that training steps wrote; of a very long run every second, fourth, ... and the last.
        steps: Number of all training steps.
        sums: Sums over all steps: the seconds of every part of a step, and "tokens" sampled.
        evaluations: Lines of metrics that evaluations wrote.
        episodes: A sample over the whole run, a few neighbours at each place, in order.
        tasks: Number of tasks by fate, and the reasons for drops.
        changed: When the run wrote last, in seconds since 1970; None if it never did.
        state: "finished", "running" (or killed: then it does not change any more), or "stopped".
        notes: Messages on unreadable parts, for people.
    """

    directory: Path
    settings: Row = field(default_factory=dict)
    training: list[Row] = field(default_factory=list)
    steps: int = 0
    sums: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    evaluations: list[Row] = field(default_factory=list)
    episodes: list[PlayedEpisode] = field(default_factory=list)
    tasks: dict[str, int] = field(default_factory=dict)
    changed: float | None = None
    state: str = "stopped"
    notes: list[str] = field(default_factory=list)


def read_run(directory: Path) -> RunFolder:
    """Read a run, whole or not.

    Raises:
        NoRunError: If nothing in the directory is of a run.
    """
    files = [directory / name for name in (CONFIG_FILE, METRICS_FILE, EPISODES_FILE, LEDGER_FILE)]
    there = [path for path in files if path.is_file()]
    if not there:
        names = ", ".join(path.name for path in files)
        raise NoRunError(f"{directory} holds no run: it has none of {names}; name a run's output_dir")
    found = RunFolder(directory)
    found.changed = max(path.stat().st_mtime for path in there)
    found.state = _state(directory)
    found.settings = _settings(directory / CONFIG_FILE, found.notes)
    _read_metrics(directory / METRICS_FILE, found)
    found.tasks = _tasks(directory / LEDGER_FILE, found.notes)
    found.episodes = _episodes(directory / EPISODES_FILE, found.notes)
    return found


def number(row: Row, name: str) -> float | None:
    """Return a finite number of a line, or None."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # A whole number may be too large for any float.
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _read_metrics(path: Path, found: RunFolder) -> None:
    """Read the metrics; the memory does not grow with the run."""
    every, last = 1, None
    for row in _rows(path, found.notes):
        if any(name.startswith("evaluate/") for name in row):
            found.evaluations.append(row)
            continue
        last = row
        _add_up(row, found.sums)
        if found.steps % every == 0:
            found.training.append(row)
            if len(found.training) >= 2 * _MOST_ROWS:
                found.training, every = found.training[::2], every * 2
        found.steps += 1
    if last is not None and found.training[-1] is not last:
        found.training.append(last)


def _add_up(row: Row, sums: defaultdict[str, float]) -> None:
    for name in row:
        if name.startswith("time/") and name.endswith("_s") and (seconds := number(row, name)) is not None:
            sums[name] += seconds
    rate, step = number(row, "time/tokens_per_s"), number(row, "time/step_s")
    sums["tokens"] += (rate or 0.0) * (step or 0.0)


def _state(directory: Path) -> str:
    # It is signed while a process holds it, such as one that goes on with more steps; one that was killed leaves its
    # name there.
    with suppress(OSError):
        if (directory / LOCK_FILE).stat().st_size > 0:
            return "running"
    # An evaluation of a model behind an API (`roll-env eval`) has no model of its own, and writes this at its end.
    return "finished" if has_ended(directory) or (directory / SUMMARY_FILE).is_file() else "stopped"


def _settings(path: Path, notes: list[str]) -> Row:
    try:
        values = read_yaml(path.read_text(encoding="utf-8", errors="replace"), path.name)
    except FileNotFoundError:
        return {}
    except (OSError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read: {_brief(error)}")
        return {}
    if not isinstance(values, dict):
        notes.append(f"{path.name} holds no settings")
        return {}
    return without_secrets(values)


def _rows(path: Path, notes: list[str]) -> Iterator[Row]:
    damaged = 0
    for line in _lines(path, notes):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and not isinstance(row["step"], bool):
            yield row
        else:
            damaged += 1
    _note_damage(path, damaged, notes)


def _lines(path: Path, notes: list[str]) -> Iterator[bytes]:
    """Yield the whole lines of a file; a last one without its end is still being written."""
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                if not line.endswith(b"\n"):
                    if len(line) < LONGEST_LINE:
                        return
                    notes.append(
                        f"{path.name} has a line of more than {LONGEST_LINE >> 20} MiB, which is left out"
                    )
                    _skip_line(file)
                    continue
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {_brief(error)}")


def _skip_line(file: Any) -> None:
    while (part := file.readline(LONGEST_LINE)) and not part.endswith(b"\n"):
        pass


def _tasks(path: Path, notes: list[str]) -> dict[str, int]:
    """Count the fates of tasks, as `rollgym.trainer.records.ledger` does."""
    fates: dict[int, str] = {}
    reissues, damaged = 0, 0
    for line in _lines(path, notes):
        try:
            event = json.loads(line)
            task, fate = event["task"], TaskEvent(event["fate"])
            if not isinstance(task, int):
                raise TypeError
        except (ValueError, RecursionError, KeyError, TypeError):
            damaged += 1
            continue
        reissues += fate is TaskEvent.REISSUED
        fates[task] = (
            f"dropped/{str(event.get('reason', ''))[:60]}" if fate is TaskEvent.DROPPED else fate.value
        )
    _note_damage(path, damaged, notes)
    counts = dict(sorted(Counter(fates.values()).items()))
    return counts | ({"issued again after a crash": reissues} if reissues else {})


def _episodes(path: Path, notes: list[str]) -> list[PlayedEpisode]:
    found: dict[int, PlayedEpisode] = {}
    damaged, first = 0, ""
    for start, line in _sampled_lines(path, notes):
        try:
            record = json.loads(line)
            trajectory = Trajectory.from_record(record)
            step, group = record.get("step"), record.get("group")
            decision = str(group.get("decision", "")) if isinstance(group, dict) else ""
            found[start] = PlayedEpisode(step if isinstance(step, int) else -1, decision, trajectory)
        except (ValueError, RecursionError, AttributeError) as error:
            damaged, first = damaged + 1, first or _brief(error)
    _note_damage(path, damaged, notes, first)
    return [found[start] for start in sorted(found)]


def _sampled_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield lines at places spread evenly over a file, and a few behind each; the cost does not grow with the file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            done = 0
            for index in range(_PLACES):
                file.seek(max(done, size * index // _PLACES))
                if file.tell() > done:
                    _skip_line(file)  # the rest of the line that the place fell into
                for _ in range(_NEIGHBOURS):
                    start = file.tell()
                    line = file.readline(LONGEST_LINE)
                    if not line.endswith(b"\n"):
                        if len(line) == LONGEST_LINE:
                            _skip_line(file)
                        break
                    yield start, line
                done = max(done, file.tell())
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {_brief(error)}")


def _note_damage(path: Path, damaged: int, notes: list[str], why: str = "") -> None:
    if damaged:
        notes.append(
            f"{path.name}: {damaged} line{'s' if damaged > 1 else ''} could not be read"
            + (f" ({why})" if why else "")
        )


def _brief(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())[:200]
