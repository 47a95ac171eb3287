"""One rank's part of a model that several ranks compute together, whatever it is that divides the model.

The loss is the same as in one process: a rank is given some of the batch's rows, its share of the loss is already
divided by counts of the whole batch, and the ranks' gradients are added up.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.algorithms.metrics import Metrics, merge
from trainer.backends.base import EntropyMode, LossFunction, MicroBatch, StepReport, TrainRow
from trainer.backends.forward_pass import ForwardPass, KeptOutputs
from trainer.backends.gradient_checkpointing import GradientCheckpointing
from trainer.backends.heads import Head
from trainer.backends.optimizer import Schedule
from trainer.backends.prefix_tree import Bucket, CallCosts
from trainer.backends.rank_group import RankGroup
from trainer.core.errors import RunError
from trainer.models.load import write_model
from trainer.models.lora import adapter_tensors, adapters_as, adapters_off, has_adapters, write_adapter
from trainer.models.weights import hub_names
from trainer.records.pieces import SavedPieces, read_pieces, write_pieces

_NOTHING = TrainRow(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
"""A row without results: what a rank computes with the others when it has no rows left."""


class WeightPieces(Protocol):
    """The weights of a model, of which each rank holds pieces. All ranks make the same calls together."""

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and whole shapes of the weights that a checkpoint holds."""
        ...

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the modules, with adapters added, gathered one at a time."""
        ...

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole adapters by the names that peft saves them with."""
        ...

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds, whole and as exactly as it is held, gathered one at a time."""
        ...

    def take(self, name: str, whole: Tensor) -> None:
        """Take a weight that all ranks have whole."""
        ...

    def computing(self) -> AbstractContextManager[object]:
        """Entered while outputs are computed without gradient."""
        ...


@runtime_checkable
class StoredPieces(WeightPieces, Protocol):
    """Weights whose pieces are tensors of this rank's own, which can be written, read and moved as they are."""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's pieces of what a checkpoint holds, by name."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """Return of a piece what this rank holds."""
        ...

    def gathered(self, tensor: Tensor) -> Tensor:
        """Return the whole of a piece."""
        ...

    def copy(self, piece: Tensor, whole: Tensor) -> None:
        """Copy of a whole what belongs into a piece."""
        ...

    def move(self, device: torch.device) -> None:
        """Bring this rank's pieces to a device's memory."""
        ...


class Applied(NamedTuple):
    """What became of a step.

    Attributes:
        norm: Norm of the gradient before clipping.
        taken: Whether the step was taken.
    """

    norm: float
    taken: bool


class ShardedOptimizer(Protocol):
    """What turns a share of the loss into a step of all ranks."""

    def backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss; the ranks' are added up, not averaged.

        Args:
            share: This rank's share.
            last: Whether it is the last one before the step.
        """
        ...

    def apply(self, finite: Tensor, rate: float) -> Applied:
        """Clip the gradients, take the step if all is finite in all ranks, and forget the gradients.

        Args:
            finite: Whether this rank's losses are.
            rate: The learning rate.
        """
        ...

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the state by paths below "optimizer", gathered one at a time; the layout is torch's."""
        ...

    def begin_load(self, plain: Mapping[str, Any]) -> None:
        """Take up what of a state is no tensor, by paths."""
        ...

    def take(self, path: str, whole: Tensor) -> None:
        """Take up a tensor of a state that all ranks have whole."""
        ...

    def end_load(self) -> None:
        """All of it was given."""
        ...

    def move(self, parts: Sequence[str], device: torch.device) -> None:
        """Bring the state ("optimizer") and the gradients ("gradients") to a device's memory."""
        ...


@runtime_checkable
class StoredOptimizer(ShardedOptimizer, Protocol):
    """An optimizer whose state is tensors of this rank's own."""

    def pieces(self) -> dict[str, Tensor]:
        """Return this rank's pieces of the state by paths, made if there were none yet: the optimizer's own."""
        ...

    def plain(self) -> dict[str, Any]:
        """Return what of the state is no tensor, by paths."""
        ...


class ShardedModel:
    """One rank's part of a model that is read and not trained.

    Args:
        head: The model and what is read off it, divided already.
        group: The ranks.
        pieces: The weights.
        dtype: Type of numbers that the model computes in.
        tokens_per_micro_batch: Tokens of a micro-batch, padding included.
        costs: Of the model's calls, where tokens of rows that begin alike go through the model once. All ranks share,
            or none does.
    """

    def __init__(
        self,
        head: Head,
        group: RankGroup,
        pieces: WeightPieces,
        *,
        dtype: torch.dtype,
        tokens_per_micro_batch: int,
        costs: CallCosts | None = None,
    ) -> None:
        self._head = head
        self._group = group
        self._pieces = pieces
        self._dtype = dtype
        self._pass = ForwardPass(head, tokens_per_micro_batch, costs)
        self._loading: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        return self._head.model

    @property
    def keeps_pieces(self) -> bool:
        """Whether the pieces are tensors of this rank's own, which it can write and read as they are."""
        return isinstance(self._pieces, StoredPieces)

    @property
    def stored(self) -> StoredPieces:
        """Its weights, where their pieces are tensors of this rank's own.

        Raises:
            ValueError: If they are not.
        """
        if not isinstance(self._pieces, StoredPieces):
            raise ValueError("what divides this model keeps its pieces to itself")
        return self._pieces

    @property
    def shares(self) -> bool:
        """Whether tokens of rows that begin alike go through the model once, where that costs less."""
        return self._pass.shares

    @property
    def why_not_shared(self) -> str | None:
        """Why rows that begin alike do not share what they begin with; None if they do, or are not meant to."""
        return self._pass.why_not_shared

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which speaks for all."""
        return self._group.rank == 0

    @property
    def has_adapter(self) -> bool:
        """Whether adapters are trained, and the model's own weights stay as they are."""
        return has_adapters(self._head.model)

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of this rank's rows; all ranks call it together, with as many micro-batches each."""
        return self._outputs(rows, entropy=False)

    def entropies(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the entropy that each token of this rank's rows was drawn with; all ranks call it together."""
        return self._outputs(rows, entropy=True)

    def _outputs(self, rows: Sequence[TrainRow], *, entropy: bool) -> list[Tensor]:
        kept = KeptOutputs(rows, entropy=entropy)
        with torch.no_grad(), self._pieces.computing():
            for bucket in self._equal_buckets(rows):
                micro = self._run(rows, bucket, "metric" if entropy else "none")
                if bucket is not None:
                    kept.add(micro)
        return kept.by_row()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the model's modules, gathered one at a time.

        Adapters come added to the weights that they lie beside.
        """
        for name, tensor in self._pieces.parameters():
            yield name, tensor.to(self._dtype)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by their Hugging Face names; tied weights once."""
        model = self._head.model
        for name, tensor in self.parameters():
            if isinstance(model, PreTrainedModel):
                yield from hub_names(model, name, tensor)
            else:
                yield name, tensor

    def digest(self) -> bytes:
        """Return a digest of all that a checkpoint holds of the weights; that of the first rank counts."""
        digest = hashlib.blake2b(digest_size=32)
        for _, tensor in self._pieces.masters():
            if self._group.rank == 0:
                digest.update(tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    def save(self, directory: Path, exact: bool = False) -> None:
        """Write the model in Hugging Face layout; the first rank does, all of them gather.

        Args:
            directory: Where to.
            exact: Whether in float32, as it is trained, and not in the type that it computes in.
        """
        model, before = self._head.model, self._dtype
        if not isinstance(model, PreTrainedModel):
            raise ValueError("a critic is saved in checkpoints only: no other tool has a use for it")
        self._dtype = torch.float32 if exact else before
        try:
            if self._group.rank == 0:
                write_model(model, self.export(), self._dtype, directory)
            else:
                _go_through(self.export())
        finally:
            self._dtype = before

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in peft's layout; the first rank does, all of them gather."""
        tensors = {name: tensor.cpu() for name, tensor in self._pieces.adapters()}
        if self._group.rank == 0:
            write_adapter(self._head.model, tensors, directory)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield a checkpoint's contents by paths (see `ranked.nested`), gathered one at a time."""
        for name, tensor in self._pieces.masters():
            yield f"model\t{name}", tensor

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's pieces of a checkpoint; all ranks call it together.

        Raises:
            RunError: If a number of any rank's is not finite: then nothing is written.
        """
        tensors = self._pieces_of_state()
        finite = torch.ones((), dtype=torch.bool, device=self._group.device)
        for tensor in tensors.values():
            finite &= self.stored.local(tensor).isfinite().all().to(finite.device)
        if not self._group.all_true(finite):
            raise RunError(
                "no checkpoint is written, because a weight or a number of the optimizer is not finite: lower "
                "optimizer.learning_rate"
            )
        write_pieces(folder, tensors, self._plain(), first=self.is_first)

    def read_pieces(self, folder: Path) -> None:
        """Take up a checkpoint that any number of ranks wrote; all ranks call it together.

        Raises:
            ValueError: If it is of another model.
        """
        saved = SavedPieces(folder)
        self._begin_pieces(saved.plain())
        tensors, shapes = self._pieces_of_state(), saved.shapes()
        if {path: tuple(tensor.shape) for path, tensor in tensors.items()} != shapes:
            raise ValueError("it is of another model")
        with torch.no_grad():
            read_pieces(folder, tensors)

    def _pieces_of_state(self) -> dict[str, Tensor]:
        """This rank's pieces of all that a checkpoint holds, by paths; they are the model's own."""
        return {f"model\t{name}": tensor for name, tensor in self.stored.named()}

    def _plain(self) -> dict[str, Any]:
        """What of a checkpoint is no tensor, by paths."""
        return {}

    def _begin_pieces(self, plain: Mapping[str, Any]) -> None:
        """Take up what is no tensor, and make room for what is."""

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Look at what is going to be loaded, and take up what is no tensor.

        Args:
            plain: The contents that are no tensors, by path.
            shapes: Shapes and types of the tensors, by path.

        Raises:
            ValueError: If it is of another model.
        """
        for name, shape in self._pieces.names():
            if shapes.get(f"model\t{name}", (None, None))[0] != shape:
                raise ValueError("it is of another model")
        self._loading = dict(shapes)

    def load(self, path: str, tensor: Tensor | None) -> None:
        """Take up a tensor, of which the first rank has the contents."""
        self._take(path, self.from_first(tensor, *self._loading[path]))

    def from_first(self, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return in all ranks the tensor that the first one was given."""
        if tensor is None:
            tensor = torch.empty(shape, dtype=dtype)
        return self._group.from_first(tensor.to(self._group.device))

    def end_load(self) -> None:
        """All of it was given."""
        self._loading = {}

    def offload(self, parts: Sequence[str]) -> None:
        """Bring what this rank holds to the processor's memory."""
        self._move(parts, torch.device("cpu"))

    def onload(self, parts: Sequence[str]) -> None:
        """Bring it back."""
        self._move(parts, self._group.device)

    def _take(self, path: str, whole: Tensor) -> None:
        kind, _, name = path.partition("\t")
        if kind == "model":
            self._pieces.take(name, whole)

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        if "parameters" in parts and isinstance(self._pieces, StoredPieces):
            self._pieces.move(device)

    def _equal_buckets(self, rows: Sequence[TrainRow]) -> list[Bucket | None]:
        """Cut this rank's rows into as many micro-batches as any rank has; None where it has none left."""
        buckets: list[Bucket | None] = [*self._pass.buckets(rows)]
        missing = self._group.largest(len(buckets)) - len(buckets)
        return [*buckets, *([None] * missing)]

    def _run(self, rows: Sequence[TrainRow], bucket: Bucket | None, entropy: EntropyMode) -> MicroBatch:
        chosen = (rows, bucket) if bucket is not None else ([_NOTHING], Bucket([0]))
        # Ranks gather weights together, call by call: all of them make as many.
        calls = self._group.largest(chosen[1].calls) if self._pass.shares else 1
        return self._pass.run(*chosen, entropy, calls)


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
        costs: Of the model's calls, where tokens of rows that begin alike go through the model once.
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
        costs: CallCosts | None = None,
    ) -> None:
        super().__init__(
            head,
            group,
            pieces,
            dtype=dtype,
            tokens_per_micro_batch=tokens_per_micro_batch,
            costs=costs,
        )
        self._optimizer = optimizer
        self._schedule = schedule
        self._steps = 0
        self._checkpointing = GradientCheckpointing(head.model, enabled=gradient_checkpointing)

    def rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._schedule.rate(self._steps)

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
            for number, bucket in enumerate(buckets, start=1):
                micro = self._run(rows, bucket, entropy)
                if bucket is None:
                    share = micro.outputs.sum() * 0.0
                else:
                    if kept is not None:
                        kept.add(micro)
                    share, metrics = loss(replace(micro, rows=numbers[micro.rows]))
                    parts.append(metrics)
                finite &= share.detach().isfinite()
                self._optimizer.backward(share, last=number == len(buckets))
        applied = self._optimizer.apply(finite, self.rate())
        self._steps += 1
        outputs = None if kept is None else kept.by_row()
        tokens = self._pass.tokens(rows, buckets)
        return StepReport(merge(parts) if applied.taken else {}, applied.norm, applied.taken, outputs, tokens)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield a checkpoint's contents by paths (see `ranked.nested`), gathered one at a time."""
        yield from super().state()
        yield from self._optimizer.state()
        yield "steps", self._steps

    def _pieces_of_state(self) -> dict[str, Tensor]:
        return {**super()._pieces_of_state(), **self._stored_optimizer.pieces()}

    def _plain(self) -> dict[str, Any]:
        return {**self._stored_optimizer.plain(), "steps": self._steps}

    @property
    def _stored_optimizer(self) -> StoredOptimizer:
        if not isinstance(self._optimizer, StoredOptimizer):
            raise ValueError("what divides this model keeps its optimizer's state to itself")
        return self._optimizer

    def _begin_pieces(self, plain: Mapping[str, Any]) -> None:
        self._steps = plain["steps"]
        self._optimizer.begin_load(plain)
        self._optimizer.end_load()

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Look at what is going to be loaded, and take up what is no tensor.

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


class ShardedPolicyWithoutAdapters:
    """The policy itself, with its adapters off, or as they were when the run began: no second model.

    Args:
        policy: The policy's part in this rank.
        warm: Whether adapters were trained before the run began. They are kept then.
    """

    def __init__(self, policy: ShardedModel, *, warm: bool) -> None:
        self._policy = policy
        self._start = (
            {name: tensor.clone() for name, tensor in adapter_tensors(policy.model)} if warm else None
        )
        self._loading: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    @property
    def keeps_pieces(self) -> bool:
        """Whether a checkpoint's pieces can be read as they are."""
        return self._policy.keeps_pieces

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of this rank's rows."""
        model = self._policy.model
        with adapters_off(model) if self._start is None else adapters_as(model, self._start):
            return self._policy.forward(rows)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield the adapters that the run began with by paths, if they were not nothing."""
        if not self._start:
            yield "adapters", {}
        for name, tensor in (self._start or {}).items():
            yield f"adapters\t{name}", self._policy.stored.gathered(tensor)

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's pieces of the adapters that the run began with, if they were not nothing."""
        plain: dict[str, Any] = {} if self._start else {"adapters": {}}
        write_pieces(folder, self._named(), plain, first=self._policy.is_first)

    def read_pieces(self, folder: Path) -> None:
        """Take them up, of however many ranks that wrote them.

        Raises:
            ValueError: If it is of other adapters.
        """
        if {path: tuple(tensor.shape) for path, tensor in self._named().items()} != SavedPieces(
            folder
        ).shapes():
            raise ValueError("it is of other adapters")
        read_pieces(folder, self._named())

    def _named(self) -> dict[str, Tensor]:
        return {f"adapters\t{name}": tensor for name, tensor in (self._start or {}).items()}

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Look at what is going to be loaded.

        Raises:
            ValueError: If it is of other adapters.
        """
        own = {path: tuple(tensor.shape) for path, tensor in self._named().items()}
        if own != {path: shape for path, (shape, _) in shapes.items()}:
            raise ValueError("it is of other adapters")
        self._loading = dict(shapes)

    def load(self, path: str, tensor: Tensor | None) -> None:
        """Take up a tensor, of which the first rank has the contents."""
        assert self._start is not None
        whole = self._policy.from_first(tensor, *self._loading[path])
        self._policy.stored.copy(self._start[path.partition("\t")[2]], whole)

    def end_load(self) -> None:
        """All of it was given."""
        self._loading = {}


def _go_through(parts: Iterator[Any]) -> None:
    for _ in parts:
        pass
