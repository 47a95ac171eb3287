"""Rows of evaluation sets that are also trained on: their scores do not measure generalisation."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from rollgym.trainer.config.data import RowsSettings
from rollgym.trainer.evaluation.evaluation_sets import EvaluationSet
from rollgym.trainer.tasks.dataset import RowStream
from rollgym.trainer.tasks.task import Task


def overlap_warnings(streams: Sequence[RowStream], sets: Iterable[EvaluationSet]) -> Iterator[str]:
    """Yield a warning for each evaluation set of rows that are among those of the training data.

    A row is the same one if it gives the same task, or stands at the same place of the same file, by any path or
    in a copy of it.
    """
    for each in sets:
        if each.settings.dataset is None:
            continue
        trained = _trained(streams, each.settings.dataset, each.tasks)
        if trained:
            yield (
                f"warning: evaluation set '{each.name}': {len(trained)} of its {len(each.tasks)} rows are trained on, "
                f"too (the first: {trained[0].row}): its scores will not show what carries over to other tasks; hold "
                "these rows out of the training data"
            )


def _trained(streams: Sequence[RowStream], data: RowsSettings, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of an evaluation set whose rows are trained on."""
    contents = [orjson.dumps(task.options, option=orjson.OPT_SORT_KEYS) for task in tasks]
    wanted = set(contents)
    found = {row for stream in streams for row in stream.rows if row in wanted}
    copies = [stream for stream in streams if _is_same_source(stream.settings, data)]
    numbers = {number for stream in copies for number in stream.numbers}
    return [
        task
        for task, content in zip(tasks, contents, strict=True)
        if content in found or _number(task) in numbers
    ]


def _number(task: Task) -> int:
    """Return the number of a row, which its place ends with."""
    return int(task.row.rpartition(" ")[2])


def _is_same_source(one: RowsSettings, other: RowsSettings) -> bool:
    if one.path is None or other.path is None:
        return (one.hub, one.subset, one.split) == (other.hub, other.subset, other.split)
    if one.split != other.split:
        return False
    paths = Path(one.path), Path(other.path)
    return paths[0].samefile(paths[1]) or _is_copy(*paths)


def _is_copy(one: Path, other: Path) -> bool:
    if not (one.is_file() and other.is_file() and one.stat().st_size == other.stat().st_size):
        return False
    return one.suffix == other.suffix and _digest(one) == _digest(other)


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()
