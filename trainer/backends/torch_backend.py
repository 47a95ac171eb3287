"""Training in one process on plain torch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.algorithms.metrics import Metrics, merge
from trainer.backends.base import EntropyMode, LossFunction, MicroBatch, StepReport, TrainRow
from trainer.backends.batching import length_buckets, pad_field, pad_rows
from trainer.backends.heads import Head
from trainer.config.run import OptimizerSettings


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate by step: linear warm-up, then constant, linear or cosine to zero.

    Attributes:
        peak: The rate after the warm-up.
        warmup_steps: Steps of the warm-up.
        total_steps: Steps of the run, where a decaying schedule ends.
        kind: "constant", "linear" or "cosine".
    """

    peak: float
    warmup_steps: int
    total_steps: int
    kind: str

    def rate(self, step: int) -> float:
        """Return the rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "linear":
            return self.peak * (1.0 - progress)
        if self.kind == "cosine":
            return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.peak


class TorchBackend:
    """A model, its optimizer and nothing of an algorithm.

    Args:
        head: The model and what is read off it.
        optimizer: AdamW's settings, gradient clip and micro-batch size.
        schedule: The learning rate.
    """

    def __init__(self, head: Head, optimizer: OptimizerSettings, schedule: Schedule) -> None:
        self._head = head
        self._settings = optimizer
        self._schedule = schedule
        self._steps = 0
        self._optimizer = torch.optim.AdamW(
            head.model.parameters(),
            lr=schedule.rate(0),
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._schedule.rate(self._steps)

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]`, zero outside its mask, without gradient."""
        results: list[Tensor] = [torch.empty(0)] * len(rows)
        with torch.no_grad():
            for bucket in self._buckets(rows):
                batch = self._run(rows, bucket, "none")
                for place, row in enumerate(bucket):
                    results[row] = batch.outputs[place, : len(rows[row].ids)]
        return results

    def step(
        self, rows: Sequence[TrainRow], loss: LossFunction, *, entropy: EntropyMode = "none"
    ) -> StepReport:
        """Take one optimizer step, and leave the weights as they are where loss or gradient is not finite.

        The losses of micro-batches are shares of one sum, so their gradients add up whatever the cut. The schedule of
        the learning rate goes on in either case: it is the run's.
        """
        self._optimizer.zero_grad(set_to_none=True)
        parts: list[Metrics] = []
        finite = True
        for bucket in self._buckets(rows):
            share, metrics = loss(self._run(rows, bucket, entropy))
            finite = finite and bool(share.isfinite())
            share.backward()
            parts.append(metrics)
        norm = torch.nn.utils.clip_grad_norm_(self._head.model.parameters(), self._settings.gradient_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = self.learning_rate
        self._steps += 1
        if not (finite and bool(norm.isfinite())):
            self._optimizer.zero_grad(set_to_none=True)
            return StepReport({}, float(norm), applied=False)
        self._optimizer.step()
        return StepReport(merge(parts), float(norm), applied=True)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their Hugging Face names; tied weights once, under the first name."""
        seen: set[int] = set()
        for name, parameter in self._head.model.named_parameters():
            if parameter.data_ptr() not in seen:
                seen.add(parameter.data_ptr())
                yield name, parameter.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizer state and the number of steps taken."""
        return {
            "model": self._head.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self._steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state that `state_dict` returned."""
        self._head.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps = state["steps"]

    def _buckets(self, rows: Sequence[TrainRow]) -> list[list[int]]:
        return length_buckets([len(row.ids) for row in rows], self._settings.tokens_per_micro_batch)

    def _run(self, rows: Sequence[TrainRow], bucket: Sequence[int], entropy: EntropyMode) -> MicroBatch:
        """Compute a micro-batch; logits only where the mask wants them, which on long prompts is most of the work."""
        chosen = [rows[place] for place in bucket]
        ids = pad_rows([row.ids for row in chosen])
        mask = pad_rows([row.mask for row in chosen])
        row, column = mask.nonzero(as_tuple=True)
        if bool((column == 0).any()):
            raise ValueError("the first token of a row cannot be trained on: nothing predicts it")
        values, entropies = self._head.outputs(ids, row, column, entropy)
        names = chosen[0].fields.keys()
        return MicroBatch(
            rows=torch.tensor(bucket),
            mask=mask,
            outputs=_scattered(values, mask, row, column),
            entropy=None if entropies is None else _scattered(entropies, mask, row, column),
            fields={name: pad_field(chosen, name) for name in names},
        )


def _scattered(values: Tensor, mask: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype).index_put((row, column), values)
