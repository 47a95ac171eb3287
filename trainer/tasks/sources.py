"""Streams of tasks: environments mixed by weight, or what an object of the user's returns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.config.rollout import TaskSettings
from trainer.core.plugins import Plugin
from trainer.core.seeding import MAX_WIRE_SEED, derive_seed, generator
from trainer.tasks.task import Task


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
        return Task(
            index=index,
            env_id=entry.env_id,
            kwargs=entry.kwargs,
            seed=derive_seed(self._seed, "task", "seed", index),
            options=entry.options,
            domain=entry.domain or entry.env_id,
            url=entry.url,
        )


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
            PluginError: If the user's code raises, or returns what is no task.
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
        return task
