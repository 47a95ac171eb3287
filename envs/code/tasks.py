"""Where tasks come from: an operator's file of items, or the problems of our own."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import Field

from rollgym.clients.protocol.json_text import read_json, read_shallow_json, write_json
from rollgym.envs.code.forms import read_item
from rollgym.envs.code.item import ItemError
from rollgym.envs.code.problems.functions import LISTS, NUMBERS, TEXTS
from rollgym.envs.code.problems.problem import CodeProblem
from rollgym.envs.code.problems.streams import STREAMS
from rollgym.envs.core.kwargs import OPERATOR
from rollgym.envs.core.splits import Split, split_of_text
from rollgym.extras import install_line
from rollgym.user_paths import expand_user

TaskData = Annotated[
    str | None,
    OPERATOR,
    Field(
        description=(
            "A file of items, `.jsonl` or `.parquet`; only an operator sets it. Without it, problems of our own."
        )
    ),
]
"""The kwarg `data` of an environment that has tasks from a `CodeTaskSource`."""


class CodeTaskSource:
    """Draws tasks.

    Args:
        data: A file of items; the problems of our own if None.
        split: Only tasks of this split, by content.

    Raises:
        ValueError: The file cannot be read, or has no task of the split.
    """

    def __init__(self, data: str | None, split: Split | None) -> None:
        self._file: ItemFile | None = None if data is None else item_file(Path(expand_user(data)))
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


class ItemFile:
    """The items of a file. Rows stay as they are in the file until they are drawn.

    Args:
        path: A file that ends in `.jsonl` or `.parquet`.

    Raises:
        ValueError: It is missing, of another kind, or its first row is not an item.
    """

    def __init__(self, path: Path) -> None:
        readers = {".jsonl": _json_lines, ".parquet": _parquet_rows}
        if path.suffix not in readers:
            raise ValueError(f"{path.name} must end in {' or '.join(readers)}")
        if not path.is_file():
            raise ValueError(f"there is no file {path}: set `data` to a file of items")
        self._rows = [_written(row, number, path) for number, row in readers[path.suffix](path)]
        if not self._rows:
            raise ValueError(f"{path.name} has no rows")
        try:
            read_item(self.row(0))
        except ItemError as error:
            raise ValueError(f"row 1 of {path.name} is no item: {error}") from None
        self._splits = [split_of_text(row.decode()) for row in self._rows]

    def row(self, number: int) -> dict[str, Any]:
        """Return the fields of a row."""
        fields: dict[str, Any] = read_json(self._rows[number])
        return fields

    def rows_of(self, split: Split | None) -> list[int]:
        """Return the numbers of the rows of a split, by content."""
        return [number for number, each in enumerate(self._splits) if split is None or each == split]


@lru_cache(maxsize=4)
def item_file(path: Path) -> ItemFile:
    """Return the items of a file, which are read once for all environments of a process."""
    return ItemFile(path)


def _written(row: Mapping[str, Any], number: int, path: Path) -> bytes:
    try:
        return write_json(row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"row {number} of {path.name} cannot be kept as JSON: {error}") from None


def _json_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = read_shallow_json(line)
            except orjson.JSONDecodeError as error:
                raise ValueError(f"line {number} of {path.name} is no JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number} of {path.name} is no JSON object")
            yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ValueError(f"{path.name} needs pyarrow: {install_line('data')}") from None
    number = 0
    for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
        for row in batch.to_pylist():
            number += 1
            yield number, row


PROBLEMS: Sequence[CodeProblem] = (*LISTS, *TEXTS, *NUMBERS, *STREAMS)


def problems_of(split: Split | None) -> Sequence[CodeProblem]:
    """Return the problems of a split, or all of them."""
    return [problem for problem in PROBLEMS if split is None or split_of_text(problem.name) == split]
