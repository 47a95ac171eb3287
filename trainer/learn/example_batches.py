"""Which examples each optimizer step learns from: a pure function of the seed, the step and the examples' lengths."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollgym.trainer.core.seeding import generator


@dataclass(frozen=True, slots=True)
class Batch:
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
        seed: The run's; the order of pass n is that of the stream `stream`, n below it.
        size: Examples of a batch.
        tokens: In place of `size`: a batch takes as many examples, in their order, as fit into this many tokens, and
            at least one.
        stream: Name of the stream.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        seed: int,
        size: int,
        tokens: int | None = None,
        stream: str = "supervised",
    ) -> None:
        if not lengths:
            raise ValueError("there is nothing to make batches of")
        self._lengths = lengths
        self._seed = seed
        self._size = size
        self._tokens = tokens
        self._stream = stream
        self._epoch: tuple[int, list[tuple[int, ...]]] = (-1, [])

    def of_epochs(self, epochs: int) -> Iterator[Batch]:
        """Yield the batches of the first passes."""
        for epoch in range(epochs):
            parts = self._cut(epoch)
            for number, part in enumerate(parts, start=1):
                yield Batch(epoch, part, number == len(parts))

    def steps(self, epochs: int) -> int:
        """Return how many batches the first passes are."""
        if self._tokens is None:
            return epochs * -(-len(self._lengths) // self._size)
        return sum(len(self._cut(epoch)) for epoch in range(epochs))

    def batch(self, step: int) -> Batch:
        """Return the batch of a step, counted from 0."""
        epoch = 0
        if self._tokens is None:
            epoch, step = divmod(step, self.steps(1))
        while True:
            parts = self._cut(epoch)
            if step < len(parts):
                return Batch(epoch, parts[step], step == len(parts) - 1)
            step -= len(parts)
            epoch += 1

    def _cut(self, epoch: int) -> list[tuple[int, ...]]:
        if self._epoch[0] != epoch:
            order = generator(self._seed, self._stream, epoch).permutation(len(self._lengths)).tolist()
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
