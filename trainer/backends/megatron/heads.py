"""Heads of Megatron's part of a model: log-probabilities over a sharded vocabulary, or values.

Log-probabilities and entropies are computed if each rank holds a slice of the vocabulary's logits (Shoeybi et al. 2019,
arXiv 1909.08053, section 3), with exact gradients. Two exchanges of a few numbers per token; logits never leave a rank.
That is independent of the way of sharding: it needs a slice of logits and the group of ranks that hold the others.
"""

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from rollgym.trainer.backends.base import EntropyMode
from rollgym.trainer.backends.heads import LOGITS_AT_ONCE, Head, in_parts
from rollgym.trainer.backends.megatron.layout import Place, length_multiple, pieces_of_row
from rollgym.trainer.backends.megatron.model import Body
from rollgym.trainer.backends.megatron.routing import RoutedLayers
from rollgym.trainer.backends.prefix_cache import SharedTokens
from rollgym.trainer.backends.rank_group import RankGroup
from rollgym.trainer.models.pictures import ImageTensors


def sharded_logprobs(
    logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup | None, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each token and, if asked, the entropy of its distribution; the same in all ranks.

    The gradient of the slice is that of the dense computation, given the same gradient of the results in all ranks.

    Args:
        logits: This rank's slice, `[n, slice]`, scaled by the temperature already. A rank may hold none of it
            (`[n, 0]`), and slices may differ in width.
        targets: Token ids in the whole vocabulary, int64 `[n]`.
        first: Token id of the slice's first column.
        group: The ranks that hold the slices; None where this one holds all.
        entropy: Whether entropies are wanted, and with gradient.

    Returns:
        Log-probabilities and entropies, float32 `[n]` each.
    """
    chosen, spread = _ShardedLogprobs.apply(logits, targets, first, group, entropy)
    return chosen, None if entropy == "none" else spread


class _ShardedLogprobs(torch.autograd.Function):
    """With p the softmax, H = -sum p log p and y the target: d log p_y / dz = e_y - p, dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        group: dist.ProcessGroup | None,
        entropy: EntropyMode,
    ) -> tuple[Tensor, Tensor]:
        numbers = logits.float()
        width = logits.shape[-1]
        highest = (
            numbers.amax(dim=-1)
            if width
            else torch.full(targets.shape, -torch.inf, dtype=torch.float32, device=logits.device)
        )
        _reduce(highest, dist.ReduceOp.MAX, group)
        shifted = numbers - highest[:, None]
        weights = shifted.exp()
        mine = (targets >= first) & (targets < first + width)
        column = (targets - first).clamp(0, max(0, width - 1))
        label = torch.zeros_like(highest)
        if width:
            label = torch.where(mine, shifted.gather(-1, column[:, None])[:, 0], 0.0)
        sums = [weights.sum(dim=-1), label]
        if entropy == "collision":
            sums.append(weights.square().sum(dim=-1))
        elif entropy != "none":
            # What a column cannot have (-inf) weighs nothing: 0 * -inf would be NaN.
            sums.append((weights * torch.where(weights > 0, shifted, 0.0)).sum(dim=-1))
        totals = torch.stack(sums)
        _reduce(totals, dist.ReduceOp.SUM, group)
        log_total = totals[0].log()
        chosen = totals[1] - log_total
        spread = torch.zeros_like(chosen)
        if entropy == "collision":
            spread = 2 * log_total - totals[2].log()
        elif entropy != "none":
            spread = log_total - totals[2] / totals[0]
        ctx.save_for_backward(logits, highest + log_total, mine, column, spread)
        ctx.entropy = entropy
        if entropy != "gradient":
            ctx.mark_non_differentiable(spread)
        return chosen, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, to_chosen: Tensor, to_spread: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_total, mine, column, spread = ctx.saved_tensors
        if not logits.shape[-1]:
            return torch.zeros_like(logits), None, None, None, None
        logp = logits.float() - log_total[:, None]
        p = logp.exp()
        gradient = -p * to_chosen[:, None]
        gradient.scatter_add_(-1, column[:, None], (to_chosen * mine)[:, None])
        if ctx.entropy == "gradient":
            apart = torch.where(p > 0, logp, 0.0) + spread[:, None]
            gradient -= p * apart * to_spread[:, None]
        return gradient.to(logits.dtype), None, None, None, None


def _reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, operation, group=group)


class MegatronHead(Head):
    """A number for some of the tokens, of a model that Megatron divides.

    In stages before the last one it returns zeros, and `handed_on` holds the input of the next stage.

    Args:
        body: This rank's part of the model.
        group: The ranks.
    """

    def __init__(self, body: Body, group: RankGroup) -> None:
        super().__init__()
        self.model: nn.Module = body
        self._group = group
        self._place = Place.of(group.shape, group.rank)
        self.handed_on: Tensor | None = None
        self._pieces: list[range] = []

    @property
    def module(self) -> nn.Module:
        """The model, by the name that Megatron's schedules look for it."""
        return self.model

    @property
    def body(self) -> PreTrainedModel:
        """There is none that transformers knows.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a model that Megatron divides has no body of transformers")

    @property
    def why_not_shared(self) -> str | None:
        """Why it cannot compute segments behind a prefix."""
        return "Megatron's attention takes no keys and values from outside"

    @property
    def why_not_packed(self) -> str | None:
        """Why it cannot compute rows behind each other."""
        return "Megatron's attention is given rows of equal length here"

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, where what is read off the model is computed."""
        return self._place.stage == self._group.shape.pipeline - 1

    def forward(
        self,
        ids: Tensor,
        row: Tensor,
        column: Tensor,
        entropy: EntropyMode,
        shared: SharedTokens | None = None,
        experts: Tensor | None = None,
        images: ImageTensors | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return outputs and entropies `[n]` of some tokens, given those before each in its row."""
        assert shared is None
        assert images is None, "policies that are divided by Megatron-Core see no pictures"
        mesh = self._group.shape
        ids = pad(ids, (0, -ids.shape[1] % length_multiple(mesh)))
        tokens = ids.shape[1]
        self._pieces = pieces = list(pieces_of_row(tokens, mesh, self._place.context))
        own = torch.cat([ids[:, piece.start : piece.stop] for piece in pieces], dim=1)
        self._route(experts, tokens, pieces)
        hidden = self.model(own, None, None)
        if not self.is_last:
            self.handed_on = hidden
            nothing = torch.zeros(len(row), device=ids.device)
            return nothing, None if entropy == "none" else nothing
        hidden = self._whole(hidden)
        targets = ids[row, column]
        if mesh.context == 1:
            return self._read(hidden[column - 1, row], targets, entropy)
        mine, line = _lines(column - 1, pieces)
        values, spread = self._read(hidden[line[mine], row[mine]], targets[mine], entropy)
        return self._of_all(mine, values), None if spread is None else self._of_all(mine, spread)

    def _route(self, experts: Tensor | None, tokens: int, pieces: list[range]) -> None:
        """Have the routers of this rank's layers take experts for this rank's tokens, or choose them."""

    @abstractmethod
    def _whole(self, hidden: Tensor) -> Tensor:
        """Return the states `[tokens, rows, width]` of this rank's part of the rows in all ranks of a layer."""

    @abstractmethod
    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        """Return outputs and entropies `[n]` of the states `[n, width]` before some tokens `[n]`."""

    def _of_all(self, mine: Tensor, values: Tensor) -> Tensor:
        """Put the values of this rank's tokens among those of the row's other ranks."""
        placed = values.new_zeros(len(mine)).masked_scatter(mine, values)
        return _Added.apply(placed, parallel_state.get_context_parallel_group())

    def _is_divided(self) -> bool:
        return bool(self._modules_of_body.config.sequence_parallel)

    @property
    def _modules_of_body(self) -> Any:
        """The model, whose modules have no types that are known here."""
        return self.model


class MegatronPolicyHead(MegatronHead):
    """Log-probabilities under the distribution that replies are drawn from.

    Each tensor-parallel rank computes the logits of its part of the vocabulary, for the requested tokens alone.

    Args:
        body: This rank's part of the model.
        group: The ranks.
        vocabulary: Number of tokens.
        temperature: The rollouts' sampling temperature.
        logits_at_once: Bound on the numbers of logits that a rank holds at one time.
    """

    def __init__(
        self,
        body: Body,
        group: RankGroup,
        vocabulary: int,
        temperature: float,
        logits_at_once: int = LOGITS_AT_ONCE,
    ) -> None:
        super().__init__(body, group)
        self._temperature = temperature
        self._routed = RoutedLayers(body, group.shape)
        if self.is_last:
            rows = len(self._weight())
            self._first = self._place.tensor * rows
            self._width = max(0, min(rows, vocabulary - self._first))
            self._tokens_at_once = max(1, logits_at_once // rows)

    def _route(self, experts: Tensor | None, tokens: int, pieces: list[range]) -> None:
        self._routed.take(experts, tokens, pieces, self._place)

    def keep_experts(self, *, wanted: bool) -> None:
        """Have forwards keep the experts that tokens take, or no longer."""
        self._routed.keep(wanted=wanted)

    def kept_experts(self, rows: int, tokens: int) -> Tensor:
        """Return those of this rank's layers and tokens, zeros elsewhere."""
        filled = sum(len(piece) for piece in self._pieces) * self._group.shape.context
        return self._routed.kept(rows, filled, self._pieces, self._place)[:, :tokens]

    def whole_experts(self, own: Tensor) -> Tensor:
        """Return those of all layers and tokens: the sum over the ranks that compute these rows."""
        whole = own.int()
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            dist.all_reduce(whole, group=group)
        return whole.to(torch.int16)

    def _weight(self) -> Tensor:
        body = self._modules_of_body
        tied = body.share_embeddings_and_output_weights
        weight: Tensor = body.shared_embedding_or_output_weight() if tied else body.output_layer.weight
        return weight

    def _whole(self, hidden: Tensor) -> Tensor:
        # Each rank makes other logits of the same states: the states' gradients are parts of a sum.
        if self._is_divided():
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden)

    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        compute = partial(self._from_states, self._weight(), entropy)
        return in_parts(compute, (states, targets), self._tokens_at_once)

    def _from_states(
        self, weight: Tensor, entropy: EntropyMode, states: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        logits = linear(states, weight[: self._width]).float() / self._temperature
        group = parallel_state.get_tensor_model_parallel_group()
        return sharded_logprobs(logits, targets, self._first, group, entropy)


class MegatronValueHead(MegatronHead):
    """Values of the states before tokens. Its one layer is whole in each rank.

    Args:
        body: This rank's part of the model.
        group: The ranks.
        width: Width of the states.
    """

    def __init__(self, body: Body, group: RankGroup, width: int) -> None:
        super().__init__(body, group)
        if self.is_last:
            # Numbers that are compared: it stays in float32.
            body.value = nn.Linear(width, 1, device=group.device, dtype=torch.float32)

    def _whole(self, hidden: Tensor) -> Tensor:
        # All ranks compute the same of the same states.
        if self._is_divided():
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden

    def _read(self, states: Tensor, targets: Tensor, entropy: EntropyMode) -> tuple[Tensor, Tensor | None]:
        return self._modules_of_body.value(states.float())[:, 0], None


def _lines(columns: Tensor, pieces: list[range]) -> tuple[Tensor, Tensor]:
    """Return which columns of rows lie in a rank's pieces, and where in these."""
    mine = torch.zeros_like(columns, dtype=torch.bool)
    line = torch.zeros_like(columns)
    before = 0
    for piece in pieces:
        inside = (columns >= piece.start) & (columns < piece.stop)
        mine |= inside
        line = torch.where(inside, columns - piece.start + before, line)
        before += len(piece)
    return mine, line


class _Added(torch.autograd.Function):
    """The sum over the ranks of a row. Each computes the loss of all of it, and the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
