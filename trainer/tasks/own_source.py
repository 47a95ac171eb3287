"""A task source of the user's: what it returns is looked at before it is played."""

from dataclasses import replace
from typing import Any

from trainer.core.plugins import Plugin
from trainer.core.seeding import MAX_WIRE_SEED
from trainer.tasks.task import Task


class OwnTaskSource:
    """Draws tasks from an object of the user's.

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
