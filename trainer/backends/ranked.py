"""A model that several ranks compute together, as one backend: the driver's end of it."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import merge
from rollgym.trainer.backends.base import (
    Digest,
    EntropyMode,
    LossFunction,
    RoutedOutputs,
    StepKernels,
    StepReport,
    TokenCounts,
    TrainRow,
)
from rollgym.trainer.backends.batching import balanced, balanced_trees, row_cost
from rollgym.trainer.backends.rank_group import MeshShape
from rollgym.trainer.backends.transport import (
    MakeBackend,
    RankDiedError,
    RankFailedError,
    RankTransport,
    RankWaitedError,
)
from rollgym.trainer.core.errors import TrainerError
from rollgym.trainer.records.pieces import SavedPieces, flattened, nested

_BESIDE_S = 2.0
"""How long after a rank's failure the others' own are waited for: they waited for each other equally long."""

_STREAM_BYTES = 2**26
"""What is sent of a model's weights at one time, unless one of them is larger."""


class Ranks:
    """A group of ranks that compute models together, and calls to all of them.

    A call that fails in one rank ends all of them: the others may be blocked in a collective that it never joins.

    Args:
        transport: What starts them and carries calls.
        mesh: How they share the work.
        device: Type of device to compute on; `auto` is the accelerator that torch finds, else the processor.
        timeout_s: How long a rank waits for the others in one exchange.
    """

    def __init__(
        self, transport: RankTransport, mesh: MeshShape, device: str = "auto", timeout_s: float = 1800.0
    ) -> None:
        self.mesh = mesh
        self._transport = transport
        self._device = device
        self._timeout_s = timeout_s
        self._streams = itertools.count()
        self._order = threading.Lock()
        self._failure: BaseException | None = None
        self._left = False

    def start(self) -> None:
        """Start the ranks and have them meet.

        Raises:
            RankDiedError: If one does not start.
            ConfigError: If one has no device.
        """
        self._transport.start(self.mesh.size)
        try:
            address = self._transport.call(0, "listen").result()
            self.everywhere("join", address, self.mesh, self._device, self._timeout_s)
        except BaseException:
            self.close()
            raise

    def begun_anew(self) -> "Ranks":
        """Have the ranks forget all models, once they have done what they are at, and return them for others.

        Calls through this object fail from then on, and closing it does not end the ranks.

        Raises:
            TrainerError: If a rank is gone, or has failed.
        """
        if self._failure is not None:
            raise RankFailedError(f"the ranks have ended: {self._failure}") from self._failure
        with self._order:
            self._failure = RankFailedError("these ranks compute for others now")
            self._left = True
        others = Ranks(self._transport, self.mesh, self._device, self._timeout_s)
        others.everywhere("forget")
        return others

    @property
    def failed(self) -> bool:
        """Whether a call failed, and the ranks have ended."""
        return self._failure is not None

    def everywhere(self, method: str, *arguments: Any) -> list[Any]:
        """Have all ranks do the same, and return their answers."""
        return self.each(method, [arguments] * self.mesh.size)

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Have each rank do one thing with arguments of its own, and return their answers.

        Raises:
            RankDiedError: If a rank is gone.
            TrainerError: If the call fails in a rank, of the type that it failed with there.
        """
        # Calls of two threads reach all ranks in one order, or they would wait for each other.
        with self._order:
            if self._failure is not None:
                raise RankFailedError(f"the ranks have ended: {self._failure}") from self._failure
            asked = [self._transport.call(rank, method, *given) for rank, given in enumerate(arguments)]
        try:
            return self._answers(asked)
        except Exception as error:
            self._failure = error
            self.close()
            raise

    def stream(self, name: str, method: str) -> Iterator[tuple[str, Any]]:
        """Yield what a backend yields by names, no more than some of it held at a time."""
        number = next(self._streams)
        self.everywhere("open_stream", number, name, method)
        try:
            while parts := self.everywhere("read_stream", number, _STREAM_BYTES)[0]:
                yield from parts
        finally:
            with suppress(TrainerError, RuntimeError):  # ranks that are gone hold no stream
                self.everywhere("close_stream", number)

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        if not self._left:
            self._transport.close()

    def _answers(self, asked: "Sequence[Future[Any]]") -> list[Any]:
        """Wait for the answers: for the first as long as it computes, then for the others as long as ranks wait."""
        wait(asked, return_when=FIRST_COMPLETED)
        wait(asked, self._timeout_s, FIRST_EXCEPTION)
        errors = [error for each in asked if each.done() and (error := each.exception()) is not None]
        if errors and not isinstance(errors[0], RankWaitedError):
            raise errors[0]
        # The ranks that waited for a hung one fail with a time-out; the hung one itself never answers.
        _, silent = wait(asked, _BESIDE_S if errors else 0.0)
        if silent and len(silent) < len(asked):
            raise self._hung([rank for rank, each in enumerate(asked) if each in silent], errors)
        return [each.result() for each in asked]

    def _hung(self, silent: Sequence[int], errors: Sequence[BaseException]) -> RankDiedError:
        names = ", ".join(map(str, silent))
        heard = f": {errors[0]}" if errors else ""
        return RankDiedError(
            f"rank {names} of {self.mesh.size} does not answer, and the others have (backend.timeout_s "
            f"{self._timeout_s:g}){heard}",
            silent[0],
        )


class RankedBackend:
    """A model that is trained by several ranks, each of which holds a part of it.

    Args:
        ranks: The ranks; several backends may share them.
        name: What the ranks call this model.
        make: The recipe by which each rank makes its part; it must be possible to send it.
        width: Width of the model, from which the cost of a row follows.
        in_pieces: Whether checkpoints are written by the ranks, each its own pieces. Otherwise all of a state is
            gathered in this process.
        before_use: Called with this model before its ranks compute with it: it brings it to its devices, if need be.
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        make: MakeBackend,
        width: int,
        *,
        in_pieces: bool = False,
        before_use: "Callable[[RankedBackend], None]" = lambda _: None,
    ) -> None:
        self._ranks = ranks
        self._before_use = before_use
        self._name = name
        self._width = width
        self._in_pieces = in_pieces
        built = ranks.everywhere("build", name, make)[0]
        self._has_adapter = bool(built["has_adapter"])
        self._shares = bool(built["shares"])
        self._why_not_shared: str | None = built["why_not_shared"]
        self._kernels: StepKernels = built["kernels"] or StepKernels()

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]`, zero outside its mask, without gradient."""
        indices = self._divided(rows)
        answers = self._each_part("forward", [(_chosen(rows, part),) for part in indices])
        return _in_order(indices, answers, len(rows))

    def forward_routed(self, rows: Sequence[TrainRow]) -> RoutedOutputs:
        """Return what `forward` does, and the experts that tokens took.

        Raises:
            ConfigError: If the model has none whose choice is known.
        """
        indices = self._divided(rows)
        answers = self._each_part("forward_routed", [(_chosen(rows, part),) for part in indices])
        return RoutedOutputs(
            _in_order(indices, [answer.outputs for answer in answers], len(rows)),
            _in_order(indices, [answer.experts for answer in answers], len(rows)),
        )

    def entropies(self, rows: Sequence[TrainRow], mode: EntropyMode = "metric") -> list[Tensor]:
        """Return the entropy that each token was drawn with, float32 `[tokens]`, without gradient."""
        indices = self._divided(rows)
        answers = self._each_part("entropies", [(_chosen(rows, part), mode) for part in indices])
        return _in_order(indices, answers, len(rows))

    def step(
        self,
        rows: Sequence[TrainRow],
        loss: LossFunction,
        *,
        entropy: EntropyMode = "none",
        keep_outputs: bool = False,
    ) -> StepReport:
        """Take one optimizer step, if loss and gradient are finite in all ranks."""
        indices = self._divided(rows)
        reports: list[StepReport] = self._each_part(
            "step", [(_chosen(rows, part), part, loss, entropy, keep_outputs) for part in indices]
        )
        first = reports[0]
        outputs = None
        if keep_outputs:
            outputs = _in_order(indices, [report.outputs or [] for report in reports], len(rows))
        metrics = merge(report.metrics for report in reports)
        counts = [sum(each) for each in zip(*(report.tokens for report in reports), strict=True)]
        tokens = TokenCounts(*counts)
        return StepReport(metrics, first.gradient_norm, first.applied, outputs, tokens, first.broken)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return float(self._ranks.everywhere("ask", self._name, "rate")[0])

    @property
    def why_not_shared(self) -> str | None:
        """Why rows that begin alike do not share what they begin with; None if they do, or are not meant to."""
        return self._why_not_shared

    @property
    def kernels(self) -> StepKernels:
        """What its steps are computed with."""
        return self._kernels

    @property
    def has_adapter(self) -> bool:
        """Whether adapters are trained, and the model's own weights stay as they are."""
        return self._has_adapter

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their Hugging Face names, gathered one at a time; tied weights once."""
        return self._stream("export")

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by the names of the model's modules."""
        return self._stream("parameters")

    def digest(self, into: Digest) -> None:
        """Add all that is trained to a digest, bit by bit and in float32."""
        into.update(self._all("digest")[0])

    def not_finite(self) -> list[str]:
        """Return the names of the weights that hold anything but finite numbers in any rank."""
        names: list[str] = self._all("not_finite")[0]
        return names

    def save(self, directory: Path, *, exact: bool = False) -> None:
        """Write the model in Hugging Face layout; the first rank writes, all of them gather.

        Args:
            directory: Where to; a folder that the ranks' machines share.
            exact: Whether in float32, as it is trained, and not in the type that it computes in.
        """
        self._all("save", directory, exact)

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in peft's layout.

        Raises:
            ValueError: If there are none.
        """
        if not self._has_adapter:
            raise ValueError("there are no adapters to save")
        self._all("save_adapter", directory)

    def drop(self) -> None:
        """Have the ranks forget this model; nothing can be asked of it afterwards."""
        self._ranks.everywhere("drop", self._name)

    def offload(self, parts: Sequence[str] = ("parameters", "optimizer")) -> None:
        """Bring what a model holds from the accelerator to the processor's memory, so that others find room there.

        Args:
            parts: Some of "parameters", "gradients" and "optimizer".
        """
        self._ranks.everywhere("ask", self._name, "offload", tuple(parts))

    def onload(self, parts: Sequence[str] = ("parameters", "optimizer")) -> None:
        """Bring what `offload` moved back to the accelerator."""
        self._ranks.everywhere("ask", self._name, "onload", tuple(parts))

    def state_dict(self) -> Any:
        """Return what is trained, the optimizer's state and the number of steps.

        Either it is gathered from all ranks, in the layout of a single process's state: either kind of backend resumes
        from the other's. Or it is what has the ranks write their pieces into a folder (`records.pieces.InPieces`).
        """
        if self._in_pieces:
            return _Pieces(self._all)
        return nested(self._stream("state"))

    def load_state_dict(self, state: Any) -> None:
        """Take up a state that `state_dict` returned or that was read of its pieces, of whatever number of ranks.

        Raises:
            ValueError: If it is of another model.
        """
        if isinstance(state, SavedPieces):
            self._all("read_pieces", state.folder)
            return
        tensors: list[tuple[str, Tensor]] = []
        plain: dict[str, Any] = {}
        for path, content in flattened(state):
            if isinstance(content, Tensor):
                tensors.append((path, content))
            else:
                plain[path] = content
        shapes = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in tensors}
        self._all("begin_load", plain, shapes)
        for path, tensor in tensors:
            contents = [tensor, *[None] * (self._ranks.mesh.size - 1)]
            self._ranks.each("ask", [(self._name, "load", path, each) for each in contents])
        self._all("end_load")

    def _divided(self, rows: Sequence[TrainRow]) -> list[list[int]]:
        parts = self._ranks.mesh.data
        if self._shares:
            return balanced_trees([row.ids.numpy() for row in rows], self._width, parts)
        return balanced([row_cost(len(row.ids), self._width) for row in rows], parts)

    def _each_part(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Have the ranks of each part of the batch compute it, and return an answer for each part."""
        self._before_use(self)
        mesh = self._ranks.mesh
        parts = [arguments[mesh.data_rank(rank)] for rank in range(mesh.size)]
        answers = self._ranks.each("ask", [(self._name, method, *given) for given in parts])
        return [answers[rank] for rank in range(mesh.size) if mesh.speaks(rank)]

    def _stream(self, method: str) -> Iterator[tuple[str, Any]]:
        self._before_use(self)
        yield from self._ranks.stream(self._name, method)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        self._before_use(self)
        return self._ranks.everywhere("ask", self._name, method, *arguments)


class _Pieces:
    """The state of a model whose ranks write it themselves, as it is when they are asked to.

    Args:
        ask: Calls a method of the model in all ranks.
    """

    def __init__(self, ask: Callable[..., list[Any]]) -> None:
        self._ask = ask

    def write(self, folder: Path) -> None:
        """Have the ranks write it into an empty folder that their machines share."""
        self._ask("write_pieces", folder)


def _chosen(rows: Sequence[TrainRow], part: Sequence[int]) -> list[TrainRow]:
    return [rows[index] for index in part]


def _in_order(
    indices: Sequence[Sequence[int]], answers: Sequence[Sequence[Tensor]], rows: int
) -> list[Tensor]:
    """Put each part's results back where its rows were."""
    ordered: list[Tensor] = [torch.empty(0)] * rows
    for part, results in zip(indices, answers, strict=True):
        for index, result in zip(part, results, strict=True):
            ordered[index] = result
    return ordered
