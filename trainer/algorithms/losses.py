"""Token losses: surrogates for the policy, squared error for the critic. All are to be minimised."""

from typing import NamedTuple

import torch
from torch import Tensor


class SurrogateLoss(NamedTuple):
    """A token loss and where its bounds took hold."""

    loss: Tensor
    clipped: Tensor


def ppo_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> SurrogateLoss:
    """Return `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` per token.

    Args:
        log_ratio: Log of r, with gradient.
        advantages: A.
        clip_low: How far the ratio may fall where that would lower the loss.
        clip_high: How far it may rise where that would lower the loss.
        dual_clip: Where A < 0, bound the loss by `-A * dual_clip`, so that a token that became far more likely
            than it was does not dominate; None is off.
    """
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        above = (advantages < 0) & (loss > ceiling)
        loss = torch.where(above, ceiling, loss)
        clipped = clipped | above
    return SurrogateLoss(loss, clipped)


def reinforce_surrogate(logprobs: Tensor, advantages: Tensor) -> SurrogateLoss:
    """Return `-A lp` per token."""
    return SurrogateLoss(-advantages * logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def weighted_surrogate(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    weight_low: float,
    weight_high: float,
    applies: Tensor | None = None,
) -> SurrogateLoss:
    """Return `-sg(clip(r, weight_low, weight_high)) A lp` per token.

    Unlike PPO's clip, a bounded ratio still lets the gradient of every token through: CISPO with bounds around 1,
    truncated importance sampling with `[0, 1]`, TOPR with `[0, 1]` on episodes of negative score only.

    Args:
        logprobs: Log-probabilities with gradient.
        log_ratio: Log of r.
        advantages: A.
        weight_low: Smallest weight.
        weight_high: Largest weight.
        applies: Where the weight is used (broadcast over tokens); elsewhere it is 1. None means everywhere.
    """
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(weight_low, weight_high)
    clipped = weight != ratio
    if applies is not None:
        weight = torch.where(applies, weight, 1.0)
        clipped = clipped & applies
    return SurrogateLoss(-weight * advantages * logprobs, clipped)


def value_surrogate(
    values: Tensor, returns: Tensor, *, old_values: Tensor | None = None, clip: float | None = None
) -> SurrogateLoss:
    """Return the critic's loss per token: half the squared error.

    Args:
        values: Values with gradient.
        returns: What they should be.
        old_values: Values at the start of the update.
        clip: Take the larger of the errors of `values` and of `values` kept within `clip` of `old_values`.

    Raises:
        ValueError: If `clip` is given without `old_values`.
    """
    error = (values - returns).square()
    clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip is not None:
        if old_values is None:
            raise ValueError("a clipped value loss needs the values at the start of the update")
        kept_near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        bounded = (kept_near - returns).square()
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    return SurrogateLoss(0.5 * error, clipped)
