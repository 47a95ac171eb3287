"""Tasks and splits of an environment, for the protocols that list them: a task is a seed, in one of its splits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgym.env_server.messages.validation import invalid

TASKS_PER_SPLIT = 10_000
"""The number of tasks that a split reports. Environments draw a task from each seed, so any number would do."""

_TYPES = {"train": "train", "valid": "validation", "validation": "validation", "test": "test"}
_ONLY = "train"


@dataclass(frozen=True, slots=True)
class SeedTasks:
    """The tasks of one environment: those of its kwarg `split`, or those of one split `train` if it has no such kwarg.

    Attributes:
        splits: The names of the splits.
        has_kwarg: Whether the environment takes the split as a kwarg.
    """

    splits: tuple[str, ...]
    has_kwarg: bool

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "SeedTasks":
        """The tasks of an environment, from its `EnvInfo`."""
        properties = described["kwargs_schema"].get("properties")
        schema = properties.get("split") if isinstance(properties, Mapping) else None
        named = schema.get("enum") if isinstance(schema, Mapping) else None
        names = tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()
        return cls(names or (_ONLY,), bool(names))

    def described(self) -> list[dict[str, str]]:
        """The splits, each with its purpose."""
        return [{"name": name, "type": _TYPES.get(name, "validation")} for name in self.splits]

    def task(self, split: str, index: int) -> dict[str, Any]:
        """One task: the fields of a reset that begins it.

        Raises:
            ProblemError: `invalid_request`, if the task does not exist.
        """
        self.check(split)
        if not 0 <= index < TASKS_PER_SPLIT:
            raise invalid("index", f"the split {split} has tasks 0 to {TASKS_PER_SPLIT - 1}")
        task: dict[str, Any] = {"task_id": f"{split}-{index}", "split": split, "index": index, "seed": index}
        return {**task, "kwargs": {"split": split}} if self.has_kwarg else task

    def range(self, split: str, start: int | None, stop: int | None) -> list[dict[str, Any]]:
        """The tasks from `start` to before `stop`, as a slice of a list has them.

        Raises:
            ProblemError: `invalid_request`, if the split does not exist.
        """
        self.check(split)
        return [self.task(split, index) for index in range(TASKS_PER_SPLIT)[start:stop]]

    def check(self, split: str) -> None:
        """Refuse a split that the environment does not have.

        Raises:
            ProblemError: `invalid_request`.
        """
        if split not in self.splits:
            raise invalid("split", f"{split[:100]!r} is none of {', '.join(self.splits)}")
