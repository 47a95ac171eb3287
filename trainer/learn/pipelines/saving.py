"""Saves a run's checkpoints while it trains: copies the weights, and writes the copy in the background."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.numbers import not_finite
from rollgym.trainer.core.shutdown import run_shielded
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.tracking import Tracker
from rollgym.trainer.records.checkpoint import CheckpointStore, RunState
from rollgym.trainer.records.ledger import Ledger
from rollgym.trainer.rollout.log_replay import LogReplay


class Saver:
    """Writes checkpoints, one at a time, and everything that belongs to the steps before them.

    Args:
        models: The models to save.
        checkpoints: The store of checkpoints.
        tracker: Flushed before the checkpoint is written.
        ledger: Flushed likewise; None if the run plays no tasks.
        log_replay: Notified of what is saved, so that the rollout log can drop it.
        asynchronous: Whether training continues while a checkpoint is written, from a copy in the host's memory.
        resident: Held while models are read: keeps them on the accelerator, from which they may be offloaded otherwise.
    """

    def __init__(
        self,
        models: Models,
        checkpoints: CheckpointStore,
        tracker: Tracker,
        ledger: Ledger | None = None,
        log_replay: LogReplay | None = None,
        *,
        asynchronous: bool = False,
        resident: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self._resident = resident
        self._models = models
        self._checkpoints = checkpoints
        self._tracker = tracker
        self._ledger = ledger
        self._log_replay = log_replay
        self._asynchronous = asynchronous
        self._writing: asyncio.Task[None] | None = None

    async def save(self, state: RunState) -> None:
        """Save a step; return when it is written or, if asynchronous, as soon as training may continue.

        The previous checkpoint is completed first. A cancellation meanwhile leaves nothing half done.

        Raises:
            RunError: If a weight, or a number of an optimizer, is not finite: then nothing is written.
            WriteError: If writing this checkpoint or the previous one failed.
        """
        await run_shielded(self._save(state))

    async def settled(self) -> None:
        """Wait until the checkpoint that is being written is whole.

        Raises:
            RunError: As `save` does.
            WriteError: If the checkpoint could not be written.
        """
        if (writing := self._writing) is not None:
            try:
                await run_shielded(_result_of(writing))
            finally:
                self._writing = None

    def raise_if_failed(self) -> None:
        """Raise if a checkpoint could not be written.

        Raises:
            RunError: As `save` does.
            WriteError: If the checkpoint could not be written.
        """
        if self._writing is not None and self._writing.done():
            writing, self._writing = self._writing, None
            writing.result()

    async def _save(self, state: RunState) -> None:
        await self.settled()
        self._tracker.flush()
        if self._ledger is not None:
            self._ledger.flush()
        scores = dict(self._tracker.scores)
        async with self._resident():
            begun, saved = await asyncio.to_thread(self._begin, state)
        self._writing = asyncio.ensure_future(self._finish(begun, state, saved, scores))
        if not self._asynchronous:
            await self.settled()

    def _begin(self, state: RunState) -> tuple[Path, dict[str, Any]]:
        """Capture the state of this very step: parts that write themselves do so before training continues."""
        saved = self._models.state_dicts()
        if self._asynchronous:
            saved = copy_to_host(saved)
        return self._checkpoints.begin(state, saved), saved

    async def _finish(
        self, begun: Path, state: RunState, saved: dict[str, Any], scores: Mapping[int, float]
    ) -> None:
        await asyncio.to_thread(self._finish_now, begun, state, saved, scores)
        if self._log_replay is not None:
            await self._log_replay.settle(state.next_task, state.untrained)

    def _finish_now(
        self, begun: Path, state: RunState, saved: dict[str, Any], scores: Mapping[int, float]
    ) -> None:
        if broken := list(not_finite(saved)):
            self._checkpoints.drop(begun)
            raise RunError(
                f"no checkpoint of step {state.step} is written, because {broken[0]} is not finite (of {len(broken)} "
                "such tensors): lower optimizer.learning_rate"
            )
        self._checkpoints.finish(begun, state, saved, scores)


async def _result_of(task: asyncio.Task[None]) -> None:
    """Wait for a task without cancelling it if the wait is cancelled."""
    await asyncio.wait({task})
    task.result()


def copy_to_host(state: Any) -> Any:
    """Return nested dictionaries and lists with copies of their tensors in the host's memory; the rest is the same."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: copy_to_host(part) for key, part in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copy_to_host(part) for part in state)
    return state
