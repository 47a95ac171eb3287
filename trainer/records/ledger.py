"""The fate of every task: trained, dropped with a reason, put aside, or issued again. One line of JSON per event.

The last event of a task is its fate. After a crash the tasks that were trained on weights newer than the checkpoint
are issued again and say so, hence every task that a finished run counts as trained is in the weights exactly once.
"""

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from rollgym.trainer.core.run_files import DamagedFileError, LineFile, read_lines

LEDGER_FILE = "ledger.jsonl"
"""The ledger's name in a run's directory."""


class TaskEvent(StrEnum):
    """The events of a task."""

    ISSUED = "issued"
    TRAINED = "trained"
    DROPPED = "dropped"
    REISSUED = "reissued"
    PUT_ASIDE = "put_aside"


class Ledger:
    """Append-only account of tasks, in memory and in a file.

    Args:
        path: The file; None keeps the account in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._fates: dict[int, TaskEvent] = {}
        self._drop_reasons: dict[int, str] = {}
        self._reissues = 0
        self._file: LineFile | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = LineFile(path)
            for line_number, event in enumerate(read_lines(path, "task"), start=1):
                if event.get("fate") not in [*TaskEvent]:
                    raise DamagedFileError(path, line_number)
                self._apply(event)

    def issued(self, index: int, version: int) -> None:
        """A task was handed to a group of episodes."""
        if index not in self._fates:
            self._write({"task": index, "fate": TaskEvent.ISSUED, "version": version})

    def trained(self, indices: Iterable[int], step: int) -> None:
        """Tasks went into the training step `step`."""
        for index in indices:
            self._write({"task": index, "fate": TaskEvent.TRAINED, "step": step})

    def dropped(self, index: int, reason: str, detail: str = "") -> None:
        """A task was left out, and why.

        Args:
            index: The task.
            reason: The reason, which tasks are counted by.
            detail: More on this one, for people.
        """
        more = {"detail": detail} if detail else {}
        self._write({"task": index, "fate": TaskEvent.DROPPED, "reason": reason, **more})

    def put_aside(self, index: int, version: int) -> None:
        """A task's episodes were stopped because they were not ready in time; it is issued again in a later round."""
        self._write({"task": index, "fate": TaskEvent.PUT_ASIDE, "version": version})

    def begun_again(self, index: int, why: str) -> None:
        """An episode of a task lost its environment with the process that played it, and is sampled from its start."""
        self._write({"task": index, "fate": TaskEvent.ISSUED, "begun_again": why})

    def roll_back(self, next_index: int, step: int, untrained: Iterable[int]) -> list[int]:
        """Return to a checkpoint: every event after it is void, and its tasks will be issued again.

        Args:
            next_index: First task that the checkpoint had never admitted.
            step: The step that the checkpoint resumes at.
            untrained: Tasks that the checkpoint had admitted and not trained.

        Returns:
            The tasks that were void and are issued again, in order.
        """
        waiting = set(untrained)
        void = sorted(index for index in self._fates if index >= next_index or index in waiting)
        for index in void:
            self._write({"task": index, "fate": TaskEvent.REISSUED, "resumed_at_step": step})
        return void

    def fate(self, index: int) -> TaskEvent | None:
        """The last thing said of a task; None if it was never issued."""
        return self._fates.get(index)

    def counts(self) -> dict[str, int]:
        """How many tasks have each fate, how often tasks were issued again, and drops by reason."""
        fates = Counter(fate.value for fate in self._fates.values())
        counts = {fate.value: fates.get(fate.value, 0) for fate in TaskEvent}
        counts["reissues"] = self._reissues
        reasons = Counter(self._drop_reasons.values())
        return counts | {f"dropped/{reason}": count for reason, count in sorted(reasons.items())}

    def flush(self) -> None:
        """Bring what was written to the operating system."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file that the ledger appends to."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: dict[str, Any]) -> None:
        self._apply(event)
        if self._file is not None:
            self._file.write(event)

    def _apply(self, event: dict[str, Any]) -> None:
        fate = TaskEvent(event["fate"])
        self._fates[event["task"]] = fate
        self._drop_reasons.pop(event["task"], None)
        if fate is TaskEvent.DROPPED:
            self._drop_reasons[event["task"]] = event.get("reason", "no reason given")
        elif fate in (TaskEvent.REISSUED, TaskEvent.PUT_ASIDE):
            self._reissues += 1
