"""Weights for tokens that another policy sampled than the one at the start of the update.

Rollout engine and trainer compute slightly different log-probabilities, and asynchronous rollouts come from older
weights. The weight `exp(old - behaviour)` multiplies the token's loss, detached. Denominators stay as they are: a
token whose weight becomes 0 still counts. With a recomputed `old`, this is decoupled PPO.
"""

import torch
from torch import Tensor

_LOG_WEIGHT_LIMIT = 20.0


def importance_weights(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return `exp(old - behaviour)` per token, detached; 1 outside the mask."""
    old = torch.where(mask, old_logprobs.detach(), 0.0)
    behaviour = torch.where(mask, behaviour_logprobs.detach(), 0.0)
    return torch.exp((old - behaviour).clamp(-_LOG_WEIGHT_LIMIT, _LOG_WEIGHT_LIMIT))


def truncated(weights: Tensor, cap: float | None) -> Tensor:
    """Return weights of at most `cap` (truncated importance sampling); None leaves them as they are."""
    return weights if cap is None else weights.clamp(max=cap)


def banded(weights: Tensor, low: float, high: float) -> Tensor:
    """Return weights that are 0 outside `[low, high]` (IcePop)."""
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, 0.0)


def mismatch_metrics(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Describe how far the sampling policy was from the policy at the start of the update, over a whole batch.

    Returns:
        Mean and maximum of the weight, its effective sample size as a part of all tokens (1 is perfect), and the k1
        and k3 estimates of KL(behaviour || old). Empty if no token counts.
    """
    if not bool(mask.any()):
        return {}
    weights = importance_weights(old_logprobs, behaviour_logprobs, mask)[mask].double()
    difference = (behaviour_logprobs.detach() - old_logprobs.detach())[mask].double()
    k3 = torch.exp(-difference.clamp(-_LOG_WEIGHT_LIMIT, _LOG_WEIGHT_LIMIT)) - 1 + difference
    numbers = torch.stack(
        [
            weights.mean(),
            weights.max(),
            weights.sum().square() / weights.square().sum() / weights.numel(),
            difference.mean(),
            k3.mean(),
        ]
    ).tolist()
    names = ("weight_mean", "weight_max", "weight_ess", "k1", "k3")
    return {f"mismatch/{name}": value for name, value in zip(names, numbers, strict=True)}
