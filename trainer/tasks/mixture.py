"""A stream of tasks that mixes environments by weight."""

from collections.abc import Sequence

import numpy as np

from trainer.config.rollout import TaskSettings
from trainer.core.seeding import derive_seed, generator
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
