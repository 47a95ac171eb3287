"""Ratios of the policy to its state at the start of the update, by token, by turn or by episode.

The sequence of GSPO (arXiv:2507.18071) is what the policy sampled in answer to a task: all sampled tokens of an
episode, in any rows. An episode's rows may be in several micro-batches, so what the other rows of a
row's episode add is counted before the loss (`elsewhere`), as the denominators of `aggregation.py` are.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import RatioLevel


def log_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    mask: Tensor,
    turn_index: Tensor,
    *,
    level: RatioLevel = "token",
    clamp: float = 20.0,
    elsewhere_difference: Tensor | None = None,
    elsewhere_tokens: Tensor | None = None,
    clip: "Clip | None" = None,
) -> Tensor:
    """Return the log of the ratio that the surrogate reads, `[rows, tokens]`; zero outside the mask.

    Above the token level, the value is the mean over the turn or episode and the gradient is the token's own: the
    GSPO-token form, `sg(mean) + lp - sg(lp)`. Its gradient equals that of the plain sequence ratio where the
    advantage is constant in the episode, and it still allows an advantage per token. The sum over an episode,
    `sequence_sum`, has the gradient `n (lp - sg(lp))`, n being the episode's tokens: averaged over them
    (`seq-mean-token-mean`) it is that of the plain product.

    Args:
        logprobs: Log-probabilities with gradient.
        old_logprobs: Log-probabilities at the start of the update.
        mask: True where a token counts.
        turn_index: Turn of each counted token.
        level: Over what the log ratio is averaged.
        clamp: Largest magnitude of the result, so that its exponential stays finite.
        elsewhere_difference: Sum of `lp - old` over the sampled tokens of the row's episode that lie in other rows,
            `[rows]`; None where every row is a whole episode. Read at the level of sequences only.
        elsewhere_tokens: How many tokens those are, `[rows]`.
        clip: Bounds of each token's log ratio before the mean is taken (GMPO); None is none.
    """
    difference = torch.where(mask, logprobs, 0.0) - torch.where(mask, old_logprobs, 0.0)
    if clip is not None:
        difference = clipped_difference(difference, clip)
    if level == "token":
        return difference.clamp(-clamp, clamp)
    plain = difference.detach()
    if level == "turn":
        average = turn_mean(plain, mask, turn_index)
    else:
        average = sequence_mean(plain, mask, elsewhere_difference, elsewhere_tokens)
    own = difference - plain
    if level == "sequence_sum":
        count = mask.sum(dim=1) if elsewhere_tokens is None else mask.sum(dim=1) + elsewhere_tokens
        average, own = average * count[:, None], own * count[:, None]
    return torch.where(mask, average + own, 0.0).clamp(-clamp, clamp)


class Clip(NamedTuple):
    """Bounds of a token's log ratio.

    Attributes:
        advantages: Their signs say which bound holds, `[rows, tokens]`.
        low: How far it may fall.
        high: How far it may rise.
    """

    advantages: Tensor
    low: float
    high: float


def clipped_difference(difference: Tensor, clip: Clip) -> Tensor:
    """Return log ratios, clipped on the side that would raise the objective (GMPO, arXiv:2507.20673, equation 4).

    `s min(s d, s clip(d, -low, high))` with the sign s of the advantage: 0 if the advantage is 0, as in verl.

    Args:
        difference: d, `lp - old` per token, with gradient.
        clip: The bounds.
    """
    sign = torch.sign(clip.advantages)
    return sign * torch.minimum(sign * difference, sign * difference.clamp(-clip.low, clip.high))


def sequence_mean(
    values: Tensor, mask: Tensor, elsewhere_sum: Tensor | None = None, elsewhere_tokens: Tensor | None = None
) -> Tensor:
    """Return, at each counted token, the mean of `values` over its episode; zero outside the mask.

    Args:
        values: A number per token, never read outside the mask.
        mask: True where a token counts.
        elsewhere_sum: What the other rows of each row's episode add to the sum, `[rows]`; None: there are none.
        elsewhere_tokens: The tokens that they add to the count, `[rows]`.
    """
    total, count = torch.where(mask, values, 0.0).sum(dim=1), mask.sum(dim=1)
    if elsewhere_sum is not None and elsewhere_tokens is not None:
        total, count = total + elsewhere_sum, count + elsewhere_tokens
    return torch.where(mask, (total / count.clamp(min=1))[:, None], 0.0)


def turn_mean(values: Tensor, mask: Tensor, turn_index: Tensor) -> Tensor:
    """Return, at each counted token, the mean of `values` over its turn, which lies in one row; zero elsewhere."""
    rows, tokens = mask.shape
    values = torch.where(mask, values, 0.0)
    if mask.numel() == 0:
        return values
    turns = torch.where(mask, turn_index, 0)
    width = int(turns.max()) + 1
    row = torch.arange(rows, device=mask.device)[:, None].expand(rows, tokens)
    key = (row * width + turns).flatten()
    total = values.new_zeros(rows * width).index_add(0, key, values.flatten())
    count = values.new_zeros(rows * width).index_add(0, key, mask.flatten().to(values.dtype))
    average = (total / count.clamp(min=1))[key].view(rows, tokens)
    return torch.where(mask, average, 0.0)


def elsewhere(values: Tensor, trajectory: Tensor) -> Tensor:
    """Return the sum of `values` over the other rows of each row's episode, `[rows]`.

    Args:
        values: A number per row: all rows of these episodes that an optimizer step trains on.
        trajectory: Episode of each row; any integers.
    """
    _, episode = torch.unique(trajectory, return_inverse=True)
    totals = values.new_zeros(int(episode.max()) + 1 if len(episode) else 0).index_add(0, episode, values)
    return totals[episode] - values


def segment_sum(values: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    """Return, at each counted token, the sum of `values` over its segment; zero elsewhere.

    Args:
        values: A number per token, `[rows, tokens]`, never read outside the mask.
        mask: True where a token counts.
        segment: Segment of each token, any integers: a segment may lie in several rows.
    """
    inverse = _segments(mask, segment)
    totals = values.new_zeros(int(inverse.max()) + 1 if inverse.numel() else 0)
    totals = totals.index_add(0, inverse, values[mask])
    spread = torch.zeros_like(values)
    spread[mask] = totals[inverse]
    return spread


def segment_max(values: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    """Return, at each counted token, the largest of `values` in its segment; zero elsewhere. See `segment_sum`."""
    inverse = _segments(mask, segment)
    largest = values.new_full((int(inverse.max()) + 1 if inverse.numel() else 0,), -torch.inf)
    largest = largest.scatter_reduce(0, inverse, values[mask], "amax")
    spread = torch.zeros_like(values)
    spread[mask] = largest[inverse]
    return spread


def _segments(mask: Tensor, segment: Tensor) -> Tensor:
    inverse: Tensor = torch.unique(segment[mask], return_inverse=True)[1]
    return inverse
