"""Fixed evaluation sets: the same tasks at every evaluation, distinct by content.

Rows that are also trained on are found: their scores do not measure generalisation.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.config.data import DatasetSettings, EvaluationSetSettings, RowsSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.rollout.data_check import check_streams
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.tasks.dataset import RowStream, load_streams
from rollgym.trainer.tasks.rows import RowPlace
from rollgym.trainer.tasks.task import Task

_SEARCH_FACTOR = 50
"""How many seeds per wanted task are tried before an evaluation set is said to be impossible."""
_BATCH = 128
"""Concurrent sessions that look for distinct first states, if the server allows that many."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """A named list of tasks for evaluation."""

    name: str
    tasks: tuple[Task, ...]
    settings: EvaluationSetSettings


async def build_evaluation_set(
    name: str, settings: EvaluationSetSettings, pool: EnvironmentPool
) -> EvaluationSet:
    """Choose an evaluation set's tasks: seeds 0, 1, 2, ... that give first states not seen before.

    Raises:
        ConfigError: If the environment does not have as many distinct first states.
    """
    if settings.dataset is not None:
        return EvaluationSet(name, await _rows_of(name, settings, settings.dataset, pool), settings)
    template = Task(0, settings.env_id, 0, settings.kwargs, settings.options, name, settings.url)
    if not settings.distinct:
        return EvaluationSet(
            name, tuple(_task(template, seed, seed) for seed in range(settings.episodes)), settings
        )
    client = await pool.client(settings.url)
    stateless = (await client.env(settings.env_id)).stateless
    seen: set[str] = set()
    tasks: list[Task] = []
    limit = settings.episodes * _SEARCH_FACTOR
    async with pool.sessions(template, min(_BATCH, settings.episodes)) as sessions:
        for start in range(0, limit, len(sessions)):
            requests = [(session, start + index, settings.options) for index, session in enumerate(sessions)]
            for index, result in enumerate(await client.reset_many(requests)):
                if isinstance(result, ProblemError):
                    raise result
                key = content_key(result.observation, result.info, stateless=stateless)
                if key not in seen:
                    seen.add(key)
                    tasks.append(_task(template, len(tasks), start + index))
                    if len(tasks) == settings.episodes:
                        return EvaluationSet(name, tuple(tasks), settings)
    raise ConfigError(
        f"evaluation set '{name}': {settings.env_id} gave only {len(tasks)} distinct first states in {limit} seeds; "
        f"ask for fewer episodes, or set distinct: false"
    )


async def _rows_of(
    name: str, settings: EvaluationSetSettings, dataset: DatasetSettings, pool: EnvironmentPool
) -> tuple[Task, ...]:
    """Return a data set's first rows, in their order, as tasks."""
    streams = load_streams(dataset)
    await check_streams(streams, pool)
    # Where verifiers share the rows, each has a stream; an evaluation set is what the file begins with.
    rows = sorted(
        (number, position, row)
        for position, stream in enumerate(streams)
        for number, row in zip(stream.numbers, stream.rows, strict=True)
    )
    if settings.distinct:
        first: dict[tuple[int, bytes], tuple[int, int, bytes]] = {}
        for number, position, row in rows:
            first.setdefault((position, row), (number, position, row))
        rows = list(first.values())
    tasks = []
    for number, position, row in rows:
        stream = streams[position]
        task = Task(0, stream.env_id, 0, dataset.kwargs, orjson.loads(row), name, dataset.url, stream.mixture)
        tasks.append(replace(task, row=str(RowPlace(stream.source, number))))
    if len(tasks) < settings.episodes:
        raise ConfigError(
            f"evaluation set '{name}': {dataset.name} has only {len(tasks)} rows for {settings.episodes} episodes; ask "
            "for fewer"
        )
    return tuple(
        replace(task, index=index, seed=index) for index, task in enumerate(tasks[: settings.episodes])
    )


def content_key(observation: Any, info: Mapping[str, Any], *, stateless: bool) -> str:
    """Return a key of the first state: `info["state"]` if the environment gives it, else the observation.

    The state of a stateless environment does not hold its task, which is the observation.
    """
    state = observation if stateless else info.get("state", observation)
    return json.dumps(state, sort_keys=True, default=str)


def _task(template: Task, index: int, seed: int) -> Task:
    return Task(
        index, template.env_id, seed, template.kwargs, template.options, template.domain, template.url
    )


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
