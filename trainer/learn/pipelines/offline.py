"""Learning from examples: step by step through batches of them, measured on others that are held out.

Which examples each step learns from is a pure function of the seed, the step and the examples' lengths.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.seeding import generator
from rollgym.trainer.core.shutdown import GracefulShutdown
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.step_metrics import memory_metrics
from rollgym.trainer.learn.tracking import EVALUATION_PREFIX, Tracker
from rollgym.trainer.records.checkpoint import RunState


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """The examples of one step.

    Attributes:
        epoch: The pass that it is of.
        indices: The examples' indices in the data.
        ends_epoch: Whether it is the last one of its pass.
    """

    epoch: int
    indices: tuple[int, ...]
    ends_epoch: bool


class ExampleBatches:
    """Passes over examples, each in an order of its own, cut into the batches of steps.

    Args:
        lengths: Tokens of each example.
        seed: The run's; the order of pass n is that of the stream "supervised", n below it.
        size: Examples of a batch.
        tokens: In place of `size`: a batch takes as many examples, in their order, as fit into this many tokens, and
            at least one.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        seed: int,
        size: int,
        tokens: int | None = None,
    ) -> None:
        if not lengths:
            raise ValueError("there is nothing to make batches of")
        self._lengths = lengths
        self._seed = seed
        self._size = size
        self._tokens = tokens
        self._epoch: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def of_epochs(self, epochs: int) -> Iterator[ExampleBatch]:
        """Yield the batches of the first passes."""
        for epoch in range(epochs):
            parts = self._cut(epoch)
            for number, part in enumerate(parts, start=1):
                yield ExampleBatch(epoch, part, number == len(parts))

    def steps(self, epochs: int) -> int:
        """Return how many batches the first passes are."""
        if self._tokens is None:
            return epochs * -(-len(self._lengths) // self._size)
        return sum(len(self._cut(epoch)) for epoch in range(epochs))

    def batch(self, step: int) -> ExampleBatch:
        """Return the batch of a step, counted from 0."""
        epoch = 0
        if self._tokens is None:
            epoch, step = divmod(step, self.steps(1))
        while True:
            parts = self._cut(epoch)
            if step < len(parts):
                return ExampleBatch(epoch, parts[step], step == len(parts) - 1)
            step -= len(parts)
            epoch += 1

    def _cut(self, epoch: int) -> list[tuple[int, ...]]:
        if self._epoch[0] != epoch:
            order = generator(self._seed, "supervised", epoch).permutation(len(self._lengths)).tolist()
            self._epoch = epoch, list(self._parts(order))
        return self._epoch[1]

    def _parts(self, order: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if self._tokens is None:
            for start in range(0, len(order), self._size):
                yield tuple(order[start : start + self._size])
            return
        part: list[int] = []
        filled = 0
        for index in order:
            if part and filled + self._lengths[index] > self._tokens:
                yield tuple(part)
                part, filled = [], 0
            part.append(index)
            filled += self._lengths[index]
        yield tuple(part)


HELD_OUT = f"{EVALUATION_PREFIX}held_out/"
"""Begins the names of what is measured on held-out examples."""


class Objective(Protocol):
    """The objective of training on examples."""

    def update(self, indices: Sequence[int]) -> dict[str, float]:
        """Take an optimizer step on the examples at some indices, and return its metrics.

        Raises:
            RunError: If too many steps in a row were left out.
        """
        ...

    def measure(self) -> dict[str, float]:
        """Return metrics of the held-out examples; empty if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Offline:
    """The parts of the training loop.

    Attributes:
        objective: The objective that is trained.
        batches: From what, step by step.
        resident: Entered for as long as models are used, which may be elsewhere meanwhile.
    """

    objective: Objective
    batches: ExampleBatches
    models: Models
    tracker: Tracker
    console: RunConsole
    saver: Saver
    resident: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


async def train_on_examples(
    parts: Offline,
    state: RunState,
    steps: int,
    checkpoint_every: int,
    measure_every: int,
    shutdown: GracefulShutdown,
) -> RunState:
    """Train until `steps` and return the run's state; if it ends before, the last complete step is saved.

    Args:
        parts: The parts of the loop.
        state: The run's progress.
        steps: Steps in all.
        checkpoint_every: Steps between checkpoints; 0 keeps only the last.
        measure_every: Steps between measurements on held-out examples; 0 measures at the ends only.
        shutdown: Requests an early, orderly end.

    Raises:
        RunError: If every optimizer step of the run was left out.
    """
    first, saved, whole = state.step, state.step, True
    trained = first > 0  # what earlier processes did is not asked again
    if not parts.tracker.evaluated(state.step) and _is_due(state.step, steps, measure_every):
        await _measure(parts, state.step)
    try:
        for step in range(state.step, steps):
            with shutdown.deferred():
                whole = False
                trained |= await _step(parts, step)
                state = RunState(step + 1, step + 1, step + 1, ())
                whole = True
            if checkpoint_every and state.step % checkpoint_every == 0:
                with shutdown.deferred():
                    await parts.saver.save(state)
                    saved = state.step
            if _is_due(state.step, steps, measure_every):
                await _measure(parts, state.step)
            if state.step == first + 1 and (odd := parts.tracker.unmeasured()) is not None:
                parts.console.say(odd)
            parts.saver.raise_if_failed()
            await asyncio.sleep(0)  # a signal that came meanwhile
        if state.step > first and not trained:
            raise RunError(
                f"all {steps} optimizer steps were left out, since loss or gradient was not finite, so the model is "
                "what it was: look at the examples, or lower optimizer.learning_rate"
            )
    finally:
        if whole and state.step > saved:
            await parts.saver.save(state)
        await parts.saver.settled()
    return state


def _is_due(step: int, steps: int, every: int) -> bool:
    return step in (0, steps) or bool(every and step % every == 0)


async def _step(parts: Offline, step: int) -> bool:
    """Learn from the batch of a step; whether its optimizer step was taken."""
    began = time.monotonic()
    batch = parts.batches.batch(step)
    async with parts.resident():
        rate = parts.models.policy.learning_rate
        metrics = await asyncio.to_thread(parts.objective.update, batch.indices)
        if parts.tracker.wants_digests:
            parts.tracker.digest(step, {"weights": await asyncio.to_thread(weights_digest, parts.models)})
    metrics |= memory_metrics()
    metrics |= {"time/step_s": time.monotonic() - began, "data/epoch": float(batch.epoch)}
    metrics["policy/learning_rate"] = rate
    parts.tracker.metrics(step + 1, metrics)
    parts.console.step(step, metrics)
    return bool(metrics["policy/optimizer_steps"])


async def _measure(parts: Offline, step: int) -> None:
    async with parts.resident():
        metrics = await asyncio.to_thread(parts.objective.measure)
    if metrics:
        parts.tracker.metrics(step, {f"{HELD_OUT}{name}": value for name, value in metrics.items()})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        parts.console.say(f"held out, after {step} steps: {shown}")


def weights_digest(models: Models) -> str:
    """Return a digest of all that is trained, bit by bit."""
    digest = hashlib.blake2b(digest_size=16)
    models.digest(digest)
    return digest.hexdigest()


def runs_of_indices(indices: range, size: int) -> Iterator[range]:
    """Yield indices in runs of at most `size`."""
    for start in range(indices.start, indices.stop, size):
        yield range(start, min(start + size, indices.stop))
