"""Where tasks come from: an operator's file of items, or the problems of our own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from envs.code.item_files import ItemFile, item_file
from envs.code.problems.catalogue import problems_of
from envs.core.kwargs import OPERATOR
from envs.core.splits import Split

TaskData = Annotated[
    str | None,
    OPERATOR,
    Field(
        description=(
            "A file of items, `.jsonl` or `.parquet`; only an operator sets it. Without it, problems of our own."
        )
    ),
]
"""The kwarg `data` of an environment that has tasks from a `TaskSource`."""


class TaskSource:
    """Draws tasks.

    Args:
        data: A file of items; the problems of our own if None.
        split: Only tasks of this split, by content.

    Raises:
        ValueError: The file cannot be read, or has no task of the split.
    """

    def __init__(self, data: str | None, split: Split | None) -> None:
        self._file: ItemFile | None = None if data is None else item_file(Path(data))
        self._split = split
        if self._file is not None and not self._file.rows_of(split):
            raise ValueError(f"the file {data} has no item of the split {split}")

    def draw(self, rng: np.random.Generator, split: Split | None = None) -> Mapping[str, Any]:
        """Draw a task."""
        wanted = split or self._split
        if self._file is not None:
            rows = self._file.rows_of(wanted)
            return self._file.row(rows[int(rng.integers(len(rows)))])
        problems = problems_of(wanted)
        return problems[int(rng.integers(len(problems)))].task(rng)
