"""Data sets as streams of tasks, one for each domain: the rows of one verifier that are reported under one name."""

import hashlib
import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollgym.clients.protocol.arrays import INTEGER_LIMIT
from rollgym.trainer.config.data import DatasetSettings, DifficultySettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.seeding import derive_seed, generator
from rollgym.trainer.tasks.curriculum import CurriculumTaskSource
from rollgym.trainer.tasks.layouts import top_column, value_at, with_question_and_answer
from rollgym.trainer.tasks.rows import Row, RowPlace, columns_of, read_rows
from rollgym.trainer.tasks.task import InterleavedTaskSource, RewardMixture, RewardPart, Task, TaskSource

_MOST_NAMED = 8
_LONG_NUMBER = re.compile(rb"\d{16}")
"""Fewer digits stay below the wire's limit."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """The rows of one domain of a data set, over and over, each pass in an order of its own.

    Attributes:
        domain: Name under which metrics are reported.
        weight: Share of the run's tasks, relative to other streams.
        env_id: The verifier.
        settings: The data set.
        rows: The fields of each task, as JSON: a million of them fit into memory, and no caller can change them.
        numbers: The number of each row in its source.
        source: The place that the rows were read from; see `RowPlace`.
    """

    domain: str
    weight: float
    env_id: str
    settings: DatasetSettings
    rows: Sequence[bytes]
    numbers: Sequence[int]
    source: str

    def item(self, number: int, index: int, seed: int) -> Task:
        """Return the stream's task `number`, which is task `index` of the run: a pure function of both and the seed."""
        passed, position = divmod(number, len(self.rows))
        if self.settings.shuffle:
            position = _index_in_pass(
                len(self.rows), derive_seed(seed, "task", "order", self.domain, passed), position
            )
        return Task(
            index=index,
            env_id=self.env_id,
            kwargs=self.settings.kwargs,
            seed=derive_seed(seed, "task", "seed", index),
            options=orjson.loads(self.rows[position]),
            domain=self.domain,
            url=self.settings.url,
            mixture=self.mixture,
            row=str(RowPlace(self.source, self.numbers[position])),
        )

    @property
    def mixture(self) -> RewardMixture | None:
        """What rewards are made of, where the verifier that plays the rows is not all."""
        if not self.settings.rewards:
            return None
        parts = [
            RewardPart(
                part.name or part.verifier,
                part.verifier,
                # By default a gate only decides whether the response earns anything: it adds to the reward
                # only if the configuration sets its weight.
                part.weight if part.gate is None or "weight" in part.model_fields_set else 0.0,
                part.gate,
                part.fields,
                part.task,
                part.url or self.settings.url,
            )
            for part in self.settings.rewards
        ]
        return RewardMixture(self.settings.reward_weight, tuple(parts))

    @property
    def digest(self) -> str:
        """A digest of the rows in their order, and of the verifiers that score them."""
        hashed = hashlib.blake2b(self.env_id.encode(), digest_size=16)
        if self.settings.rewards:  # by what they ask, and not by where
            hashed.update(str(self.settings.reward_weight).encode())
        for part in self.settings.rewards:
            hashed.update(part.model_dump_json(exclude={"url"}).encode())
        for row in self.rows:
            hashed.update(row)
            hashed.update(b"\n")
        return hashed.hexdigest()


def load_streams(settings: DatasetSettings) -> list[RowStream]:
    """Read a data set and give its streams, by domain.

    Raises:
        ConfigError: If it cannot be read, has a row that no verifier is named for, or has no rows that are kept.
    """
    rows: dict[str, list[bytes]] = {}
    numbers: dict[str, array[int]] = {}
    source = ""
    unknown: dict[str, RowPlace] = {}
    read = 0
    for place, row in read_rows(settings):
        if settings.limit is not None and read == settings.limit:
            break
        read += 1
        value = _routed(settings, row, place)
        if settings.route is not None and value not in settings.route.verifiers:
            unknown.setdefault(value, place)
            continue
        if settings.difficulty is None or _is_kept(settings.difficulty, row, place):
            rows.setdefault(value, []).append(_fields(settings, row, place))
            numbers.setdefault(value, array("q")).append(place.number)
            source = place.source
    if unknown:
        shown = ", ".join(f"{value!r} ({place})" for value, place in list(unknown.items())[:_MOST_NAMED])
        more = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        assert settings.route is not None
        raise ConfigError(
            f"data set {settings.name}: route.verifiers names no verifier for these values of "
            f"'{settings.route.column}': {shown}{more}"
        )
    if not rows:
        why = "has no rows" if not read else f"has {read} rows, and the difficulty keeps none of them"
        raise ConfigError(f"data set {settings.name} {why}")
    return [
        RowStream(
            domain=settings.domain or value or _verifier(settings, value),
            weight=_weight(settings, value, rows),
            env_id=_verifier(settings, value),
            settings=settings,
            rows=tuple(rows[value]),
            numbers=numbers[value],
            source=source,
        )
        for value in sorted(rows)
    ]


def _routed(settings: DatasetSettings, row: Row, place: RowPlace) -> str:
    """Return the value that a row is routed by; an empty one where all go to one verifier."""
    if settings.route is None:
        return ""
    if row.get(settings.route.column) is None:
        raise ConfigError(f"data set {place}: the row has no '{settings.route.column}' to route it by")
    return str(row[settings.route.column])


def _verifier(settings: DatasetSettings, value: str) -> str:
    if settings.route is not None:
        return settings.route.verifiers[value]
    assert settings.verifier is not None
    return settings.verifier


def _weight(settings: DatasetSettings, value: str, rows: dict[str, list[bytes]]) -> float:
    shares: dict[str, float] = {name: float(len(kept)) for name, kept in rows.items()}
    if settings.route is not None and settings.route.weights:
        shares = {name: settings.route.weights[name] for name in rows}
    return settings.weight * shares[value] / sum(shares.values())


def _is_kept(difficulty: DifficultySettings, row: Row, place: RowPlace) -> bool:
    number = row.get(difficulty.column)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ConfigError(f"data set {place}: '{difficulty.column}' must be a number, not {number!r}")
    above = difficulty.minimum is None or number >= difficulty.minimum
    return above and (difficulty.maximum is None or number <= difficulty.maximum)


def _fields(settings: DatasetSettings, row: Row, place: RowPlace) -> bytes:
    missing = [column for column in settings.columns.values() if value_at(row, column) is None]
    if missing:
        raise ConfigError(
            f"data set {place}: the row has no {', '.join(missing)}; its columns are {columns_of(row)}"
        )
    read = {*(top_column(row, column) for column in settings.columns.values()), *settings.omit}
    read |= {part.column for part in (settings.route, settings.difficulty) if part is not None}
    fields: dict[str, Any] = {name: value for name, value in row.items() if name not in read}
    fields |= {field: value_at(row, column) for field, column in settings.columns.items()}
    try:
        fields = with_question_and_answer(fields)
    except ValueError as error:
        raise ConfigError(f"data set {place}: {error}") from error
    try:
        # Tables fill up what a row does not have.
        given = {field: value for field, value in fields.items() if value is not None}
        row_json = orjson.dumps(given, option=orjson.OPT_SORT_KEYS)
    except TypeError as error:
        raise ConfigError(f"data set {place}: {error}; leave that column out with 'omit'") from error
    # `null` is written for what JSON has no number for, and a verifier would miss the field.
    if b"null" in row_json or _LONG_NUMBER.search(row_json):
        for field, value in given.items():
            _check_numbers(value, field, place)
    return row_json


def _check_numbers(value: Any, field: str, place: RowPlace) -> None:
    """Refuse numbers that tables hold and JSON or the wire does not.

    Raises:
        ConfigError: If one is not finite, or an integer that is too large.
    """
    if type(value) is int and abs(value) >= INTEGER_LIMIT:
        raise ConfigError(
            f"data set {place}: '{field}' holds the integer {value}, and integers on the wire stay below 2**53: "
            "write it as text, or leave that column out with 'omit'"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            f"data set {place}: '{field}' is {value}, which JSON has no number for; mend the row, or leave that column "
            "out with 'omit'"
        )
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part, field, place)


_ROUNDS = 4


def _index_in_pass(count: int, seed: int, number: int) -> int:
    """Return where a pass over `count` indices stands at its step `number`: a permutation, without a table of it.

    A Feistel network over the next even power of two, walked until it lands on an index.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = generator(seed, "keys").integers(1, 2**62, _ROUNDS).tolist()
    index = number
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            mixed = hashlib.blake2b(f"{key}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & mask)
        index = (left << half) | right
        if index < count:
            return index


def row_streams(source: TaskSource) -> list[RowStream]:
    """Return the streams of a task source that come from data sets."""
    if not isinstance(source, InterleavedTaskSource | CurriculumTaskSource):
        return []
    return [stream for stream in source.streams if isinstance(stream, RowStream)]
