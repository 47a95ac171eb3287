"""One rank's part of a model that several ranks train together, with any way of sharding.

The loss is the same as in one process: a rank receives some of the batch's rows, its share of the loss is already
divided by counts of the whole batch, and the ranks' gradients are added up.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Metrics, merge
from rollgym.trainer.backends.base import (
    EntropyMode,
    LossFunction,
    MicroBatch,
    StepKernels,
    StepReport,
    TrainRow,
)
from rollgym.trainer.backends.forward_pass import KeptOutputs
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.layers import CompiledLayers, GradientCheckpointing
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.prefix_plan import Bucket
from rollgym.trainer.backends.prefix_tree import CallCosts
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.sharded_model import ShardedModel
from rollgym.trainer.backends.sharded_optimizer import ShardedOptimizer
from rollgym.trainer.backends.weight_pieces import WeightPieces


class ShardedBackend(ShardedModel):
    """One rank's part of a model that is trained.

    Args:
        head: The model and what is read off it, divided already.
        group: The ranks.
        pieces: The weights.
        optimizer: What steps them.
        schedule: The learning rate.
        dtype: Type of numbers that the model computes in.
        tokens_per_micro_batch: Tokens of a micro-batch, padding included.
        gradient_checkpointing: Whether activations are computed once more for the gradient in place of being kept.
        layers: Those that are compiled, if any.
        costs: Of the model's calls, where tokens of rows that begin alike go through the model once.
        packs: Whether rows are computed behind each other, without padding.
    """

    def __init__(
        self,
        head: Head,
        group: RankGroup,
        pieces: WeightPieces,
        optimizer: ShardedOptimizer,
        schedule: Schedule,
        *,
        dtype: torch.dtype,
        tokens_per_micro_batch: int,
        gradient_checkpointing: bool,
        layers: CompiledLayers | None = None,
        costs: CallCosts | None = None,
        packs: bool = False,
    ) -> None:
        super().__init__(
            head,
            group,
            pieces,
            dtype=dtype,
            tokens_per_micro_batch=tokens_per_micro_batch,
            costs=costs,
            packs=packs,
        )
        self._optimizer = optimizer
        self._schedule = schedule
        self._steps = 0
        self._checkpointing = GradientCheckpointing(head.model, enabled=gradient_checkpointing)
        self._layers = layers or CompiledLayers(head, None)

    @property
    def kernels(self) -> StepKernels:
        """What its steps are computed with."""
        return StepKernels(self._layers.compiler, self._optimizer.fused, self._pass.packs)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._schedule.rate(self._steps)

    def step(
        self,
        rows: Sequence[TrainRow],
        indices: Sequence[int],
        loss: LossFunction,
        entropy: EntropyMode,
        keep_outputs: bool,
    ) -> StepReport:
        """Take part in one optimizer step, which is taken if loss and gradient are finite in all ranks.

        Args:
            rows: This rank's rows.
            indices: Their indices in the batch.
            loss: The loss, in shares; it reads rows by their indices in the batch.
            entropy: Whether it reads entropies.
            keep_outputs: Whether the report brings what was computed of this rank's rows.
        """
        numbers = torch.tensor(indices, dtype=torch.int64, device=self._group.device)
        kept = KeptOutputs(rows) if keep_outputs else None
        parts: list[Metrics] = []
        finite = torch.ones((), dtype=torch.bool, device=self._group.device)

        def share_of(bucket: Bucket | None, micro: MicroBatch) -> Tensor:
            if bucket is None:
                share = micro.loss_of_nothing()
            else:
                if kept is not None:
                    kept.add(micro)
                share, metrics = loss(replace(micro, rows=numbers[micro.rows]))
                parts.append(metrics)
            finite.logical_and_(share.detach().isfinite())
            return share

        buckets = self._equal_buckets(rows)
        with self._checkpointing.active(), self._layers.active():
            self._each(rows, buckets, entropy, share_of)
        applied = self._optimizer.apply(finite, self.rate())
        self._steps += 1
        outputs = None if kept is None else kept.by_row()
        tokens = self._pass.tokens(rows, buckets)
        metrics = merge(parts) if applied.taken else {}
        return StepReport(metrics, applied.norm, applied.taken, outputs, tokens, applied.broken)

    def _backward(self, share: Tensor, *, last: bool) -> None:
        self._optimizer.backward(share, last=last)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield a checkpoint's contents by paths (see `ranked.nested`), gathered one at a time."""
        yield from super().state()
        yield from self._optimizer.state()
        yield "steps", self._steps

    def _pieces_of_state(self) -> dict[str, Tensor]:
        return {**super()._pieces_of_state(), **self._optimizer.pieces()}

    def _plain(self) -> dict[str, Any]:
        return {**self._optimizer.plain(), "steps": self._steps}

    def _begin_pieces(self, plain: Mapping[str, Any]) -> None:
        self._steps = plain["steps"]
        self._optimizer.begin_load(plain)
        self._optimizer.end_load()

    def _pieces_read(self) -> None:
        self._optimizer.pieces_read()

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Check what is going to be loaded, and load its parts other than tensors.

        Raises:
            ValueError: If it is of another model.
        """
        super().begin_load(plain, shapes)
        self._steps = plain["steps"]
        self._optimizer.begin_load(plain)

    def end_load(self) -> None:
        """All of it was given."""
        super().end_load()
        self._optimizer.end_load()

    def _take(self, path: str, whole: Tensor) -> None:
        if path.startswith("model\t"):
            super()._take(path, whole)
        else:
            self._optimizer.take(path, whole)

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        super()._move(parts, device)
        self._optimizer.move(parts, device)
