"""Weights for tokens that another policy sampled than the one at the start of the update, and their rejection.

Rollout engine and trainer compute slightly different log-probabilities, and asynchronous rollouts come from older
weights. The weight `exp(old - behaviour)` multiplies the token's loss, detached. Denominators stay unchanged: a
token whose weight becomes 0 still counts. With a recomputed `old`, this is decoupled PPO.

Everywhere the ratio is that of the policy in training to the one that sampled, `exp(old - behaviour)`.
"""

from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import Measure, Statistic, WeightLevel
from rollgym.trainer.algorithms.ratio import segment_max, segment_sum

_LOG_WEIGHT_LIMIT = 20.0
_SMALLEST_PROBABILITY = 1e-6


def importance_weights(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    level: WeightLevel = "token",
    segment: Tensor | None = None,
) -> Tensor:
    """Return `exp(old - behaviour)` per token, detached; 1 outside the mask.

    Args:
        old_logprobs: Log-probabilities at the start of the update, `[rows, tokens]`.
        behaviour_logprobs: Log-probabilities recorded when the tokens were sampled.
        mask: True where the policy sampled the token.
        level: `token`; `turn` and `geometric`: the geometric mean over each token's segment; `sequence`: the product
            over it.
        segment: Turn or sequence of each token, any integers; each row is one if None.
    """
    difference = _difference(old_logprobs, behaviour_logprobs, mask)
    if level != "token":
        segment = _or_rows(segment, mask)
        total = segment_sum(difference, mask, segment)
        difference = total if level == "sequence" else total / _counts(difference, mask, segment)
    return torch.exp(difference.clamp(-_LOG_WEIGHT_LIMIT, _LOG_WEIGHT_LIMIT))


def truncated(weights: Tensor, cap: float | None, floor: float = 0.0) -> Tensor:
    """Return weights of at most `cap` (truncated importance sampling) and at least `floor`; None means uncapped."""
    if cap is None and not floor:
        return weights
    return weights.clamp(floor if floor else None, cap)


def banded(weights: Tensor, low: float, high: float) -> Tensor:
    """Return weights that are 0 outside `[low, high]` (IcePop)."""
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, 0.0)


def normalised(weights: Tensor, mask: Tensor, sequence: Tensor | None = None) -> Tensor:
    """Return weights divided by their mean, as they are if that is 0 (verl's rollout_is_batch_normalize).

    Args:
        weights: Of tokens, `[rows, tokens]`.
        mask: Which count.
        sequence: Sequence of each token: the mean is taken over sequences, each by the mean of its tokens. None: over
            tokens.
    """
    counted = torch.where(mask, weights, 0.0).double()
    share = mask.double()
    if sequence is not None:
        share = share / _counts(counted, mask, sequence)
    mean = (counted * share).sum() / share.sum().clamp(min=1e-8)
    return weights if float(mean) <= 1e-8 else weights / mean.to(weights.dtype)


def rejection_mask(
    old_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    mask: Tensor,
    *,
    measure: Measure = "ratio",
    statistic: Statistic = "mean",
    low: float | None = None,
    high: float | None = None,
    segment: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Tensor:
    """Return which tokens are kept: those whose segment lies within the bounds.

    Args:
        old_logprobs: Log-probabilities under the policy in training, `[rows, tokens]`.
        behaviour_logprobs: Log-probabilities recorded when the tokens were sampled.
        mask: True where the policy sampled the token.
        measure: What is measured of each token, with d = old - behaviour: `ratio` exp(d), `k1` -d, `k2` d^2 / 2, `k3`
            exp(d) - 1 - d, `probability` p - p_behaviour, `variation` its magnitude, `binary_kl` the larger of the two
            KL divergences of the token against all others, `behaviour_kl` the one from p_behaviour to p (OpenRLHF).
        statistic: What is made of the tokens of a segment: `mean` (of ratios the geometric one), `sum` (of ratios the
            product), `max`, or `all`: each token must lie within the bounds.
        low: Smallest value that is kept.
        high: Largest.
        segment: Turn or sequence of each token, any integers; each token is one of its own if None.
        advantages: If given, only tokens of negative advantage are rejected.
    """
    old = torch.where(mask, old_logprobs.detach(), 0.0)
    behaviour = torch.where(mask, behaviour_logprobs.detach(), 0.0)
    value = _measured(old, behaviour, measure)
    if segment is not None:
        value = _over_segments(value, mask, segment, statistic)
    if measure == "ratio":
        value = torch.exp(value.clamp(-_LOG_WEIGHT_LIMIT, _LOG_WEIGHT_LIMIT))
    kept = _inside(value, low, high)
    if segment is not None and statistic == "all":
        kept = segment_sum((~kept).to(value.dtype), mask, segment) == 0
    if advantages is not None:
        kept = kept | (advantages >= 0)
    return kept & mask


def _measured(old: Tensor, behaviour: Tensor, measure: Measure) -> Tensor:
    """Return the measure of each token; of the ratio its logarithm, which is what means and sums are taken of."""
    near = (old - behaviour).clamp(-_LOG_WEIGHT_LIMIT, _LOG_WEIGHT_LIMIT)
    match measure:
        case "ratio":
            return near
        case "k1":
            return -near
        case "k2":
            return near.square() / 2
        case "k3":
            return torch.exp(near) - 1 - near
        case "probability":
            return old.exp() - behaviour.exp()
        case "variation":
            return (old.exp() - behaviour.exp()).abs()
        case "binary_kl":
            return torch.maximum(binary_kl(old, behaviour), binary_kl(behaviour, old))
        case "behaviour_kl":
            return binary_kl(behaviour, old)
        case _:
            assert_never(measure)


def binary_kl(logprobs: Tensor, others: Tensor) -> Tensor:
    """Return KL(p || q) of the two-way choices between each token and all others, given log p and log q."""
    bounds = (_SMALLEST_PROBABILITY, 1 - _SMALLEST_PROBABILITY)
    p, q = (each.exp().clamp(*bounds) for each in (logprobs, others))
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))


def _over_segments(value: Tensor, mask: Tensor, segment: Tensor, statistic: Statistic) -> Tensor:
    match statistic:
        case "mean":
            return segment_sum(value, mask, segment) / _counts(value, mask, segment)
        case "sum":
            return segment_sum(value, mask, segment)
        case "max":
            return segment_max(value, mask, segment)
        case "all":
            return value
        case _:
            assert_never(statistic)


def _inside(value: Tensor, low: float | None, high: float | None) -> Tensor:
    inside = torch.ones_like(value, dtype=torch.bool)
    if low is not None:
        inside = inside & (value >= low)
    if high is not None:
        inside = inside & (value <= high)
    return inside


def _difference(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor) -> Tensor:
    old = torch.where(mask, old_logprobs.detach(), 0.0)
    return old - torch.where(mask, behaviour_logprobs.detach(), 0.0)


def _or_rows(segment: Tensor | None, mask: Tensor) -> Tensor:
    if segment is not None:
        return segment
    return torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)


def _counts(like: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    return segment_sum(torch.ones_like(like), mask, segment).clamp(min=1)


def interpolated_logprobs(logprobs: Tensor, behaviour_logprobs: Tensor, shares: Tensor) -> Tensor:
    """Return a guess at the log-probabilities at the start of an update, without a forward pass (AReaL's loglinear).

    Args:
        logprobs: Log-probabilities under the policy in training; no gradient goes through them.
        behaviour_logprobs: Log-probabilities recorded when the tokens were sampled.
        shares: How far on the way from the one to the other each token is; see `version_shares`.
    """
    return behaviour_logprobs + shares * (logprobs.detach() - behaviour_logprobs)


def version_shares(versions: Tensor, current_version: int) -> Tensor:
    """Return `(v - 1 - v_sampled) / (v - v_sampled)` within [0, 1], 0 where nothing was sampled.

    Args:
        versions: Version of the policy that sampled each token, negative at tokens that no policy sampled.
        current_version: Version v of the policy that the update makes: the one it starts from is v - 1.
    """
    behind = current_version - versions.double()
    share = torch.where((behind > 0) & (versions >= 0), (behind - 1) / behind.clamp(min=1), 0.0)
    return share.clamp(0.0, 1.0).float()


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
