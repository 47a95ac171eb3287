"""A task: which environment, with which kwargs, from which seed. And the streams of tasks that a run plays.

Streams are environments mixed by weight, domains whose shares hold in every block, or the user's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from rollgym.trainer.config.rollout import TaskSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import Plugin
from rollgym.trainer.core.seeding import MAX_WIRE_SEED, derive_seed, generator


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A verifier that scores a task's response beside the one that it is played with.

    Attributes:
        name: What its share of the reward is called.
        verifier: Its environment id.
        weight: What its score is multiplied by.
        gate: The score that it must give, or the response earns nothing; None if it does not act as a gate.
        fields: Its task fields that come from fields of the task, by their names there.
        task: Fields that every task has for it.
        url: Its server; None for the run's default.
    """

    name: str
    verifier: str
    weight: float
    gate: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    url: str | None = None


@dataclass(frozen=True, slots=True)
class RewardMixture:
    """What a task's reward is made of.

    Attributes:
        own: What the reward of the environment itself is multiplied by.
        parts: The others.
    """

    own: float
    parts: tuple[RewardPart, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to play. Equal tasks give equal first observations.

    Attributes:
        index: Index in the stream that the task comes from.
        env_id: The environment, as its server lists it.
        kwargs: What the environment is made with.
        seed: What it is reset with.
        options: What else it is reset with.
        domain: Name under which metrics of this kind of task are reported.
        url: The server; None for the run's default.
        mixture: Other verifiers that have a part in the reward; None where the environment's is all.
        row: Where the options come from if they are this task's own, such as a row of a data set; empty where tasks of
            their kind have them in common. It is for messages.
    """

    index: int
    env_id: str
    seed: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] | None = None
    domain: str = ""
    url: str | None = None
    mixture: RewardMixture | None = None
    row: str = field(default="", compare=False)

    @property
    def mixture_parts(self) -> tuple[RewardPart, ...]:
        """The other verifiers that have a part in the reward."""
        return self.mixture.parts if self.mixture is not None else ()

    @property
    def session_key(self) -> str:
        """Tasks with equal keys can be played in one session, one after the other."""
        return json.dumps([self.url, self.env_id, self.kwargs], sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the task as plain data."""
        return {
            "index": self.index,
            "env_id": self.env_id,
            "kwargs": dict(self.kwargs),
            "seed": self.seed,
            "options": dict(self.options) if self.options is not None else None,
            "domain": self.domain,
            "url": self.url,
        } | self._rare()

    def _rare(self) -> dict[str, Any]:
        """Return what most tasks have nothing of."""
        rare: dict[str, Any] = {}
        if self.mixture is not None:
            parts = [_as_dict(part) for part in self.mixture.parts]
            rare["mixture"] = _as_dict(self.mixture) | {"parts": parts}
        if self.row:
            rare["row"] = self.row
        return rare


def _as_dict(of: RewardMixture | RewardPart) -> dict[str, Any]:
    return {each.name: getattr(of, each.name) for each in fields(of)}


class TaskSource(Protocol):
    """An endless stream of tasks.

    `task` is a pure function of the index, so the data cursor of a run is one number, an asynchronous run plays the
    same stream as a synchronous one, and a task can be issued again after a crash.
    """

    def task(self, index: int) -> Task:
        """Return the task at `index`."""
        ...


_KEPT_BLOCKS = 64


class TaskStream(Protocol):
    """The tasks of one domain."""

    @property
    def domain(self) -> str:
        """Name under which metrics are reported."""
        ...

    @property
    def weight(self) -> float:
        """Share of the run's tasks, relative to other streams."""
        ...

    def item(self, number: int, index: int, seed: int) -> Task:
        """Return the stream's task `number`, which is task `index` of the run."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentStream:
    """Tasks that an environment draws from their seeds."""

    settings: TaskSettings

    @property
    def domain(self) -> str:
        """Name under which metrics are reported."""
        return self.settings.domain or self.settings.env_id

    @property
    def weight(self) -> float:
        """Share of the run's tasks."""
        return self.settings.weight

    def item(self, number: int, index: int, seed: int) -> Task:
        """Return a task whose seed is that of its place in the run."""
        return Task(
            index=index,
            env_id=self.settings.env_id,
            kwargs=self.settings.kwargs,
            seed=derive_seed(seed, "task", "seed", index),
            options=self.settings.options,
            domain=self.domain,
            url=self.settings.url,
        )


class InterleavedTaskSource:
    """Mixes streams so that each has its share in every block of tasks, in an order drawn for that block.

    Task *i* stays a pure function of the seed and *i*: how many tasks of a stream came before a block is the block's
    number times the stream's share, so that nothing has to be counted, and nothing remembered for a resumed run.

    Args:
        streams: What is mixed.
        block: Tasks of a block.
        seed: Of the run.

    Raises:
        ConfigError: If a stream's share of a block is less than one task.
    """

    def __init__(self, streams: Sequence[TaskStream], block: int, seed: int) -> None:
        if not streams:
            raise ConfigError("a run needs at least one data set, or one entry under 'tasks'")
        self.streams = tuple(streams)
        self._block = block
        self._seed = seed
        self.counts = counts_in_block([stream.weight for stream in streams], block)
        for stream, count in zip(streams, self.counts, strict=True):
            if not count:
                share = stream.weight / sum(each.weight for each in streams)
                raise ConfigError(
                    f"'{stream.domain}' has a share of {share:.2%}, which is less than one task in {block}: raise its "
                    "weight or rollout.groups_per_step, or set interleave: stream"
                )
        self._order = lru_cache(maxsize=_KEPT_BLOCKS)(self._draw_order)

    def task(self, index: int) -> Task:
        """Return the task at `index`: equal for equal (seed, index), whatever was asked before."""
        block, position = divmod(index, self._block)
        choice, rank = self._order(block)[position]
        return self.streams[choice].item(block * self.counts[choice] + rank, index, self._seed)

    def _draw_order(self, block: int) -> tuple[tuple[int, int], ...]:
        """Return for each place of a block its stream, and which of the block's tasks of that stream it has."""
        places = [(choice, rank) for choice, count in enumerate(self.counts) for rank in range(count)]
        if len(self.streams) == 1:
            return tuple(places)
        order = generator(self._seed, "task", "block", block).permutation(len(places))
        return tuple(places[int(index)] for index in order)


def counts_in_block(weights: Sequence[float], block: int) -> tuple[int, ...]:
    """Return how many of a block's tasks each stream has: whole numbers, as near to the shares as they can be."""
    shares = np.array(weights, dtype=np.float64) * block / sum(weights)
    counts = np.floor(shares + 1e-9).astype(int)
    missing = block - int(counts.sum())
    for index in np.argsort(counts - shares, kind="stable")[:missing]:
        counts[index] += 1
    return tuple(int(count) for count in counts)


class MixtureTaskSource:
    """Draws each task's environment by weight and its seed at random, both from named streams of the run's seed."""

    def __init__(self, settings: Sequence[TaskSettings], seed: int) -> None:
        if not settings:
            raise ValueError("a run needs at least one entry under 'tasks'")
        self._settings = list(settings)
        self._seed = seed
        weights = np.array([entry.weight for entry in self._settings], dtype=np.float64)
        self._probabilities = weights / weights.sum()

    def task(self, index: int) -> Task:
        """Return the task at `index`: equal for equal (seed, index), whatever was asked before."""
        if len(self._settings) == 1:
            entry = self._settings[0]
        else:
            choice = generator(self._seed, "task", "domain", index).choice(
                len(self._settings), p=self._probabilities
            )
            entry = self._settings[int(choice)]
        return EnvironmentStream(entry).item(index, index, self._seed)


class OwnTaskSource:
    """Draws tasks from an object of the user's; what it returns is looked at before it is played.

    Args:
        plugin: The setting that named it.
        source: The object: its method `task` takes an index and returns a `Task`.
    """

    def __init__(self, plugin: Plugin, source: Any) -> None:
        if not callable(getattr(source, "task", None)):
            raise plugin.broken(
                f"must return an object with a method task(index), not {type(source).__name__}"
            )
        self._plugin = plugin
        self._source = source

    def task(self, index: int) -> Task:
        """Return the task at `index`.

        Raises:
            PluginError: If the user's code raises, or returns something other than a task.
        """
        with self._plugin.running():
            task = self._source.task(index)
        if not isinstance(task, Task):
            raise self._plugin.broken(f"gave {type(task).__name__} for task {index}, which is no Task")
        if isinstance(task.seed, bool) or not isinstance(task.seed, int):
            raise self._plugin.broken(f"gave task {index} the seed {task.seed!r}, which is no integer")
        if not 0 <= task.seed < MAX_WIRE_SEED:
            raise self._plugin.broken(
                f"gave task {index} the seed {task.seed}; seeds are from 0 to 2**53 - 1"
            )
        if task.index != index:
            raise self._plugin.broken(f"gave task {task.index} for index {index}")
        if task.options is not None and not task.row:
            task = replace(task, row=f"task {index} of {self._plugin.path}")
        try:
            json.dumps([task.session_key, task.as_dict()])
        except (TypeError, ValueError, RecursionError) as error:
            raise self._plugin.broken(
                f"gave task {index}, whose kwargs, options and names are not all JSON: {error}"
            ) from error
        return task
