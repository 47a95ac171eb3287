"""The interface of a training backend. It holds a model and its optimizer, and never an algorithm."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Metrics
from rollgym.trainer.records.images import PlacedImage


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One token sequence to compute on.

    Attributes:
        ids: Token ids, int64 `[tokens]`.
        mask: True where a result is wanted, bool `[tokens]`; never at the first token, which nothing predicts.
        fields: Further numbers per token, `[tokens]` each, handed to the loss in the type that they have here: float32,
            or int64 for what counts or names something. All rows of a batch have the same.
        experts: Experts that tokens are to take, layer by layer that has some, int16 `[tokens, layers * taken]`. At -1,
            and behind its end, the model's routers choose; None if they choose all.
        images: Pictures among the tokens, in order.
    """

    ids: Tensor
    mask: Tensor
    fields: Mapping[str, Tensor] = field(default_factory=dict)
    experts: Tensor | None = None
    images: Sequence[PlacedImage] = ()

    def with_fields(self, fields: Mapping[str, Tensor]) -> Self:
        """Return it with further fields beside its own."""
        return replace(self, fields={**self.fields, **fields})


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a loss reads: tensors of a few rows, padded to equal length, `[rows, tokens]` each.

    Attributes:
        rows: Indices of the rows in the batch that was given to the backend, int64 `[rows]`.
        mask: True where a result was wanted.
        outputs: Log-probability of each token given those before it (or value of the state before it); with gradient
            while training, zero outside the mask.
        entropy: Entropy of the distribution that each token was drawn from; None if not requested.
        fields: The rows' further numbers in their own types, zero outside the row.
    """

    rows: Tensor
    mask: Tensor
    outputs: Tensor
    entropy: Tensor | None
    fields: Mapping[str, Tensor]

    def loss_of_nothing(self) -> Tensor:
        """Return a loss of 0 that all that the head computed takes part in."""
        return loss_of_nothing(self.outputs, self.entropy)


def loss_of_nothing(*computed: Tensor | None) -> Tensor:
    """Return a loss of 0 that all outputs of a head take part in, for a rank that has no rows left.

    An output without a path into the loss has no backward pass: where weights are gathered in backward passes too, the
    other ranks, whose losses read it, would wait for this one for ever.

    Args:
        computed: Each output; None in place of one that was not requested.
    """
    return torch.stack([each.sum() for each in computed if each is not None]).sum() * 0.0


LossFunction = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""Returns the micro-batch's share of the loss, already divided by counts of the whole batch, and metrics.

It may be sent to other processes: it can be pickled, and does nothing but return (such as a `functools.partial` of a
module's function over tensors and settings).
"""


EntropyMode = Literal["none", "metric", "gradient", "collision"]
"""Which entropies are computed: none, Shannon's as numbers only or with gradient, or those of order two as numbers.

That of order two is `-log sum p^2`: minus the logarithm of the chance that two draws are equal.
"""


class RoutedOutputs(NamedTuple):
    """What was computed of rows, and the experts that did.

    Attributes:
        outputs: Of each row, as `Scorer.forward` returns them.
        experts: Those that the tokens of each row took, layer by layer, int16 `[tokens, layers * taken]`.
    """

    outputs: list[Tensor]
    experts: list[Tensor]


class TokenCounts(NamedTuple):
    """Tokens of a step.

    Attributes:
        rows: Of its rows.
        computed: Of those, what went through the model: tokens that rows share do so once.
    """

    rows: int = 0
    computed: int = 0


class StepKernels(NamedTuple):
    """What steps are computed with.

    Attributes:
        compiler: What compiles the layers, by torch's name; None if they run uncompiled.
        fused: Whether the optimizer takes a step in one kernel.
        packed: Whether rows are computed behind each other, without padding.
    """

    compiler: str | None = None
    fused: bool = False
    packed: bool = False


class StepReport(NamedTuple):
    """What an optimizer step came to.

    Attributes:
        metrics: The loss's metrics; none where the step was left out.
        gradient_norm: Norm of the gradient before clipping.
        applied: Whether the step was taken. It is left out where the loss or its gradient is not finite.
        outputs: What was computed of each row before the step, as `Scorer.forward` returns it; None if not requested.
        tokens: Tokens of its rows.
        broken: What was not finite, where the step was left out.
    """

    metrics: Metrics
    gradient_norm: float
    applied: bool
    outputs: Sequence[Tensor] | None = None
    tokens: TokenCounts = TokenCounts()
    broken: str = ""


class Digest(Protocol):
    """What bytes are added to, such as those of hashlib."""

    def update(self, data: Any, /) -> object:
        """Add bytes to the digest, in order."""
        ...


class Scorer(Protocol):
    """A model that is read and not trained."""

    def forward(self, rows: Sequence[TrainRow]) -> list[Tensor]:
        """Return the outputs of each row, float32 `[tokens]`, zero outside its mask, without gradient."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs; its tensors are the model's own."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state.

        Raises:
            ValueError: If it is of another model.
        """
        ...


class TrainBackend(Scorer, Protocol):
    """A model that can be trained. The backend owns it: callers read its weights through these methods only.

    Calls block for as long as they compute or write: they are made in threads, one at a time.
    """

    def forward_routed(self, rows: Sequence[TrainRow]) -> RoutedOutputs:
        """Return what `forward` does, and the experts that tokens took: rows that have these take them again.

        Raises:
            ConfigError: If the model has no experts whose choice is known.
        """
        ...

    def entropies(self, rows: Sequence[TrainRow], mode: EntropyMode = "metric") -> list[Tensor]:
        """Return the entropy that each token was drawn with, float32 `[tokens]`, zero outside its row's mask."""
        ...

    def step(
        self,
        rows: Sequence[TrainRow],
        loss: LossFunction,
        *,
        entropy: EntropyMode = "none",
        keep_outputs: bool = False,
    ) -> StepReport:
        """Take one optimizer step, if loss and gradient are finite.

        Args:
            rows: The batch.
            loss: Its loss, in shares.
            entropy: Whether the loss reads entropies.
            keep_outputs: Whether the report brings what was computed of each row.
        """
        ...

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights by their Hugging Face names, always in the same order and one at a time."""
        ...

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same by the names of the modules of the model in this process."""
        ...

    def digest(self, into: Digest) -> None:
        """Add all that is trained to a digest, bit by bit."""
        ...

    def not_finite(self) -> list[str]:
        """Return the names of the weights that hold anything but finite numbers; nothing is gathered for it."""
        ...

    def save(self, directory: Path) -> None:
        """Write the model in Hugging Face layout, without a tokenizer."""
        ...

    def save_adapter(self, directory: Path) -> None:
        """Write the adapters in peft's layout.

        Raises:
            ValueError: If there are none.
        """
        ...

    @property
    def why_not_shared(self) -> str | None:
        """Why rows that begin alike do not share what they begin with; None if they do, or are not meant to."""
        ...

    @property
    def kernels(self) -> StepKernels:
        """What its steps are computed with."""
        ...

    @property
    def has_adapter(self) -> bool:
        """Whether adapters are trained, and the model's own weights stay as they are."""
        ...
