"""One rank's part of a model that several ranks train together, whatever it is that divides the model.

The loss is the same as in one process: a rank is given some of the batch's rows, its share of the loss is already
divided by counts of the whole batch, and the ranks' gradients are added up.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.algorithms.metrics import Metrics, merge
from trainer.backends.base import EntropyMode, LossFunction, MicroBatch, StepReport, TrainRow
from trainer.backends.forward_pass import ForwardPass, KeptOutputs
from trainer.backends.gradient_checkpointing import GradientCheckpointing
from trainer.backends.heads import Head
from trainer.backends.optimizer import Schedule
from trainer.backends.rank_group import RankGroup
from trainer.models.load import write_model
from trainer.models.lora import adapter_tensors, has_adapters, write_adapter
from trainer.models.weights import hub_names, parameters_of

_NOTHING = TrainRow(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
"""A row without results: what a rank computes with the others when it has no rows left."""


class ShardedBackend(ABC):
    """What all kinds of sharding have in common.

    Args:
        head: The model and what is read off it, divided.
        group: The ranks.
        schedule: The learning rate.
        dtype: Type of numbers that the model computes in; what is trained is held in float32.
        tokens_per_micro_batch: Tokens of a micro-batch, padding included.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
    """

    def __init__(
        self,
        head: Head,
        group: RankGroup,
        schedule: Schedule,
        *,
        dtype: torch.dtype,
        tokens_per_micro_batch: int,
        gradient_checkpointing: bool,
    ) -> None:
        self._head = head
        self._group = group
        self._schedule = schedule
        self._dtype = dtype
        self._steps = 0
        self._pass = ForwardPass(head, tokens_per_micro_batch)
        self._checkpointing = GradientCheckpointing(head.model, enabled=gradient_checkpointing)
        self.has_adapter = has_adapters(head.model)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._schedule.rate(self._steps)

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of this rank's rows; all ranks call it together, with as many micro-batches each."""
        kept = KeptOutputs(rows)
        with torch.no_grad(), self._reading():
            for bucket in self._equal_buckets(rows):
                micro = self._run(rows, bucket, "none")
                if bucket is not None:
                    kept.add(micro)
        return kept.by_row()

    def step(
        self,
        rows: Sequence[TrainRow],
        places: Sequence[int],
        loss: LossFunction,
        entropy: EntropyMode,
        keep_outputs: bool,
    ) -> StepReport:
        """Take part in one optimizer step, which is taken if loss and gradient are finite in all ranks.

        Args:
            rows: This rank's rows.
            places: Their indices in the batch.
            loss: The loss, in shares; it reads rows by their indices in the batch.
            entropy: Whether it reads entropies.
            keep_outputs: Whether the report brings what was computed of this rank's rows.
        """
        numbers = torch.tensor(places, dtype=torch.int64, device=self._group.device)
        kept = KeptOutputs(rows) if keep_outputs else None
        parts: list[Metrics] = []
        finite = torch.ones((), dtype=torch.bool, device=self._group.device)
        with self._checkpointing.active():
            buckets = self._equal_buckets(rows)
            for number, bucket in enumerate(buckets):
                micro = self._run(rows, bucket, entropy)
                if bucket is None:
                    share = micro.outputs.sum() * 0.0
                else:
                    if kept is not None:
                        kept.add(micro)
                    share, metrics = loss(replace(micro, rows=numbers[micro.rows]))
                    parts.append(metrics)
                finite &= share.detach().isfinite()
                self._backward(share, last=number == len(buckets) - 1)
        norm = self._apply(finite, self.rate())
        self._steps += 1
        outputs = None if kept is None else kept.by_row()
        if norm.applied:
            return StepReport(merge(parts), norm.value, applied=True, outputs=outputs)
        return StepReport({}, norm.value, applied=False, outputs=outputs)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by their Hugging Face names, gathered one at a time; all ranks go through them."""
        model = self._head.model
        if not isinstance(model, PreTrainedModel):
            yield from self.parameters()
            return
        for name, tensor in self.parameters():
            yield from hub_names(model, name, tensor)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by the names of the model's modules."""
        with self._whole():
            for name, tensor in parameters_of(self._head.model):
                yield name, self._gathered(tensor).to(self._dtype)

    def digest(self) -> bytes:
        """Return a digest of all that is trained, in float32; that of the first rank counts."""
        digest = hashlib.blake2b(digest_size=32)
        for _, tensor in self._masters():
            if self._group.rank == 0:
                digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy())
        return digest.digest()

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face layout; the first rank does, all of them gather."""
        model = self._head.model
        if not isinstance(model, PreTrainedModel):
            raise ValueError("a critic is saved in checkpoints only: no other tool has a use for it")
        if self._group.rank == 0:
            write_model(model, self.export(), self._dtype, directory)
        else:
            _go_through(self.export())

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in peft's layout; the first rank does, all of them gather."""
        with self._whole():
            tensors = {
                name: self._gathered(tensor).cpu() for name, tensor in adapter_tensors(self._head.model)
            }
        if self._group.rank == 0:
            write_adapter(self._head.model, tensors, directory)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield a checkpoint's contents by paths (see `ranked.nested`), gathered one at a time."""
        for name, tensor in self._masters():
            yield f"model\t{name}", tensor
        yield from self._optimizer_state()
        yield "steps", self._steps

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Look at what is going to be loaded, and take up what is no tensor.

        Args:
            plain: The contents that are no tensors, by path.
            shapes: Shapes and types of the tensors, by path.

        Raises:
            ValueError: If it is of another model.
        """
        for name, shape in self._shapes():
            if shapes.get(f"model\t{name}", ((), None))[0] != shape:
                raise ValueError("it is of another model")
        self._loading = dict(shapes)
        self._steps = plain["steps"]
        self._begin_optimizer(plain)

    def load(self, path: str, tensor: Tensor | None) -> None:
        """Take up a tensor, of which the first rank has the contents."""
        shape, dtype = self._loading[path]
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype)
        self._take(path, self._group.from_first(tensor.to(self._group.device)))

    def end_load(self) -> None:
        """All of it was taken up."""
        self._loading = {}
        self._end_optimizer()

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    @abstractmethod
    def _backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss; the ranks' are added up, not averaged."""

    @abstractmethod
    def _apply(self, finite: Tensor, rate: float) -> "Applied":
        """Clip the gradients, take the step if all is finite, and forget the gradients.

        Args:
            finite: Whether this rank's losses are.
            rate: The learning rate.
        """

    @abstractmethod
    def _gathered(self, tensor: Tensor) -> Tensor:
        """Return the whole of which this rank holds a part; all ranks call it together."""

    @abstractmethod
    def _shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the whole shapes of what is trained, by name."""

    @abstractmethod
    def _masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what is trained whole and in float32, gathered one at a time."""

    @abstractmethod
    def _optimizer_state(self) -> Iterator[tuple[str, Any]]:
        """Yield the optimizer's state by paths, gathered one at a time."""

    @abstractmethod
    def _begin_optimizer(self, plain: Mapping[str, Any]) -> None:
        """Take up what of an optimizer's state is no tensor."""

    @abstractmethod
    def _take(self, path: str, tensor: Tensor) -> None:
        """Take up a whole tensor of a model's or an optimizer's state."""

    @abstractmethod
    def _end_optimizer(self) -> None:
        """Take up what was collected for the optimizer."""

    def _whole(self) -> AbstractContextManager[object]:
        """Entered while whole weights are read."""
        return nullcontext()

    def _reading(self) -> AbstractContextManager[object]:
        """Entered while outputs are computed without gradient."""
        return nullcontext()

    def _equal_buckets(self, rows: Sequence[TrainRow]) -> list[list[int] | None]:
        """Cut this rank's rows into as many micro-batches as any rank has; None where it has none left."""
        buckets: list[list[int] | None] = [*self._pass.buckets(rows)] if rows else []
        missing = self._group.largest(len(buckets)) - len(buckets)
        return [*buckets, *([None] * missing)]

    def _run(self, rows: Sequence[TrainRow], bucket: list[int] | None, entropy: EntropyMode) -> MicroBatch:
        if bucket is None:
            return self._pass.run([_NOTHING], [0], entropy)
        return self._pass.run(rows, bucket, entropy)


class Applied:
    """What became of a step.

    Attributes:
        value: Norm of the gradient before clipping.
        applied: Whether the step was taken.
    """

    def __init__(self, value: float, applied: bool) -> None:
        self.value = value
        self.applied = applied


def _go_through(parts: Iterator[Any]) -> None:
    for _ in parts:
        pass
