"""Log-probabilities and entropies if each rank holds a slice of the vocabulary's logits (Shoeybi et al. 2019,
arXiv 1909.08053, section 3), with exact gradients. Two exchanges of a few numbers per token; logits never leave a rank.

It is independent of the way of sharding: it needs a slice of logits and the group of ranks that hold the others.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollgym.trainer.backends.base import EntropyMode


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
