"""One rank's part of a model that several ranks compute or train together, with any way of sharding.

The loss is the same as in one process: a rank receives some of the batch's rows, its share of the loss is already
divided by counts of the whole batch, and the ranks' gradients are added up.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollgym.trainer.algorithms.aggregation import Metrics, merge
from rollgym.trainer.backends.base import (
    EntropyMode,
    LossFunction,
    MicroBatch,
    RoutedOutputs,
    StepKernels,
    StepReport,
    TrainRow,
)
from rollgym.trainer.backends.batching import RowBucket
from rollgym.trainer.backends.forward_pass import ForwardPass, KeptOutputs
from rollgym.trainer.backends.heads import Head
from rollgym.trainer.backends.layers import CompiledLayers, GradientCheckpointing
from rollgym.trainer.backends.optimizer import Schedule, ShardedOptimizer
from rollgym.trainer.backends.prefix_tree import CallCosts
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.backends.weight_pieces import WeightPieces, local_of
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.core.run_files import write_errors
from rollgym.trainer.models.load import write_model
from rollgym.trainer.models.lora import has_adapters, write_adapter
from rollgym.trainer.models.weights import hub_names
from rollgym.trainer.records.pieces import BoxedTensor, SavedPieces, read_pieces, write_pieces

_NOTHING = TrainRow(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
"""A row without results: what a rank computes with the others when it has no rows left."""


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
        packs: Whether rows are computed behind each other, without padding.
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
        packs: bool = False,
    ) -> None:
        self._head = head
        self._group = group
        self._pieces = pieces
        self._dtype = dtype
        self._pass = ForwardPass(head, tokens_per_micro_batch, costs, group.plans, packs=packs)
        self._loading: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The model, of which this rank holds its shards."""
        return self._head.model

    @property
    def shares(self) -> bool:
        """Whether a shared prefix of rows goes through the model once if that is cheaper."""
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
        return self._outputs(rows, "none")

    def forward_routed(self, rows: Sequence[TrainRow]) -> RoutedOutputs:
        """Return what `forward` does, and the experts that tokens took; all ranks call it together.

        Raises:
            ConfigError: If the model has none whose choice is known.
        """
        kept = KeptOutputs(rows)

        def keep(bucket: RowBucket | None, micro: MicroBatch) -> None:
            if bucket is not None:
                kept.add(micro)

        with torch.no_grad(), self._pieces.computing(), self._pass.keeping_experts(rows) as experts:
            self._each(rows, self._equal_buckets(rows, apart=True), "none", keep)
        return RoutedOutputs(kept.by_row(), experts.by_row())

    def entropies(self, rows: Sequence[TrainRow], mode: EntropyMode = "metric") -> list[Tensor]:
        """Return the entropy that each token of this rank's rows was drawn with; all ranks call it together."""
        return self._outputs(rows, mode)

    def _outputs(self, rows: Sequence[TrainRow], entropy: EntropyMode) -> list[Tensor]:
        kept = KeptOutputs(rows, entropy=entropy != "none")

        def keep(bucket: RowBucket | None, micro: MicroBatch) -> None:
            if bucket is not None:
                kept.add(micro)

        with torch.no_grad(), self._pieces.computing():
            self._each(rows, self._equal_buckets(rows), entropy, keep)
        return kept.by_row()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights by the names of the model's modules, gathered one at a time.

        Adapters come added to the weights that they lie beside.
        """
        for name, tensor in self._pieces.parameters():
            yield name, tensor.to(self._dtype)

    @property
    def hub_model(self) -> PreTrainedModel | None:
        """The model as the library has it, of which names and configuration are read; None of a critic."""
        model = self._head.model
        return model if isinstance(model, PreTrainedModel) else None

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by their Hugging Face names; tied weights once."""
        model = self.hub_model
        for name, tensor in self.parameters():
            if model is not None:
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

    def not_finite(self) -> list[str]:
        """Return the names of weights that hold anything but finite numbers in any rank; nothing is gathered."""
        return self._broken({name: held.isfinite().all() for name, held in self._pieces.held()})

    def _broken(self, finite: Mapping[str, Tensor]) -> list[str]:
        everywhere = self._group.all_true_each(list(finite.values()))
        return [name for name, is_finite in zip(finite, everywhere, strict=True) if not is_finite]

    def save(self, directory: Path, exact: bool = False) -> None:
        """Write the model in Hugging Face layout; the first rank does, all of them gather.

        Args:
            directory: Where to.
            exact: Whether in float32, as it is trained, and not in the type that it computes in.
        """
        model, before = self.hub_model, self._dtype
        if model is None:
            raise ValueError("a critic is saved in checkpoints only: no other tool has a use for it")
        self._dtype = torch.float32 if exact else before
        try:
            if self._group.rank == 0:
                with write_errors(directory):
                    write_model(model, self.export(), self._dtype, directory)
            else:
                _go_through(self.export())
        finally:
            self._dtype = before

    def adapters(self) -> dict[str, Tensor]:
        """Return copies of the whole adapters by the names that peft saves them with."""
        return {name: tensor.detach().clone() for name, tensor in self._pieces.adapters()}

    @contextmanager
    def adapters_as(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """While inside, the model computes with other adapters, which all ranks have whole."""
        before = self.adapters()
        self._pieces.put_adapters(tensors)
        try:
            yield
        finally:
            self._pieces.put_adapters(before)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in peft's layout; the first rank does, all of them gather."""
        tensors = {name: tensor.cpu() for name, tensor in self._pieces.adapters()}
        if self._group.rank == 0:
            with write_errors(directory):
                write_adapter(self._head.model, tensors, directory)

    def state(self) -> Iterator[tuple[str, Any]]:
        """Yield a checkpoint's contents by paths (see `ranked.nested`), gathered one at a time."""
        for name, tensor in self._pieces.masters():
            yield f"model\t{name}", tensor

    def write_pieces(self, folder: Path) -> None:
        """Write this rank's pieces of a checkpoint; all ranks call it together.

        Raises:
            RunError: If a number of any rank's is not finite: then nothing is written.
            WriteError: If the disk does not take it, in whichever rank.
        """
        tensors = self._pieces_of_state()
        if broken := self._broken({path: _is_finite(tensor) for path, tensor in tensors.items()}):
            raise RunError(
                f"no checkpoint is written, because {broken[0].replace(chr(9), '.')} is not finite (of {len(broken)} "
                "such tensors): lower optimizer.learning_rate"
            )
        with write_errors(folder):
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
            self._pieces_read()

    def _pieces_of_state(self) -> dict[str, Tensor]:
        """This rank's pieces of all that a checkpoint holds, by paths; they are the model's own."""
        return {f"model\t{name}": tensor for name, tensor in self._pieces.named()}

    def _plain(self) -> dict[str, Any]:
        """Parts of a checkpoint other than tensors, by paths."""
        return {}

    def _begin_pieces(self, plain: Mapping[str, Any]) -> None:
        """Load the parts of a checkpoint other than tensors, and allocate the tensors."""

    def _pieces_read(self) -> None:
        """The pieces have other contents now."""

    def begin_load(self, plain: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        """Check what is going to be loaded, and load its parts other than tensors.

        Args:
            plain: The contents other than tensors, by path.
            shapes: Shapes and types of the tensors, by path.

        Raises:
            ValueError: If it is of another model.
        """
        own = {f"model\t{name}": shape for name, shape in self._pieces.names()}
        if any(path not in shapes or shapes[path][0] != shape for path, shape in own.items()):
            raise ValueError("it is of another model")
        # Weights that are not ours, such as those beside adapters, are left out.
        self._loading = {
            path: shape for path, shape in shapes.items() if path in own or not path.startswith("model\t")
        }

    def load(self, path: str, tensor: Tensor | None) -> None:
        """Take up a tensor, of which the first rank has the contents."""
        if path in self._loading:
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
        """Bring what `offload` moved back to this rank's device."""
        self._move(parts, self._group.device)

    def _take(self, path: str, whole: Tensor) -> None:
        kind, _, name = path.partition("\t")
        if kind == "model":
            self._pieces.take(name, whole)

    def _move(self, parts: Sequence[str], device: torch.device) -> None:
        if "parameters" in parts:
            self._pieces.move(device)

    def _each(
        self,
        rows: Sequence[TrainRow],
        buckets: Sequence[RowBucket | None],
        entropy: EntropyMode,
        then: Callable[[RowBucket | None, MicroBatch], Tensor | None],
    ) -> None:
        """Compute micro-batches, and the gradients of what `then` makes of each: its share of the loss, if any."""
        for number, bucket in enumerate(buckets, start=1):
            share = then(bucket, self._run(rows, bucket, entropy))
            if share is not None:
                self._backward(share, last=number == len(buckets))

    def _backward(self, share: Tensor, *, last: bool) -> None:
        """Add the gradients of a share of the loss.

        Raises:
            TypeError: If nothing is trained.
        """
        raise TypeError("a model that is only read has no gradients")

    def _equal_buckets(self, rows: Sequence[TrainRow], *, apart: bool = False) -> list[RowBucket | None]:
        """Cut this rank's rows into as many micro-batches as any rank has; None in place of those that it lacks."""
        buckets: list[RowBucket | None] = [*self._pass.buckets(rows, apart=apart)]
        missing = self._group.largest(len(buckets)) - len(buckets)
        return [*buckets, *([None] * missing)]

    def _run(self, rows: Sequence[TrainRow], bucket: RowBucket | None, entropy: EntropyMode) -> MicroBatch:
        chosen = (rows, bucket) if bucket is not None else ([_NOTHING], RowBucket([0]))
        # Ranks gather weights together, call by call: all of them make as many.
        calls = self._group.largest(chosen[1].calls) if self._pass.shares else 1
        return self._pass.run(*chosen, entropy, calls)


def _is_finite(piece: Tensor) -> Tensor:
    """Whether all numbers of a piece that this rank holds are finite."""
    return piece.finite() if isinstance(piece, BoxedTensor) else local_of(piece).isfinite().all()


def _go_through(parts: Iterator[Any]) -> None:
    for _ in parts:
        pass


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

        def share_of(bucket: RowBucket | None, micro: MicroBatch) -> Tensor:
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
