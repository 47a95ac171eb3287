"""Token losses: surrogates for the policy, errors of the critic. All are to be minimised."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_BOUND = 20.0
"""Magnitude of log ratios beyond which their exponential is not taken."""


class SurrogateLoss(NamedTuple):
    """A token loss and where its bounds took hold."""

    loss: Tensor
    clipped: Tensor


def ppo_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float | None = 0.2,
    clip_high: float | None = 0.2,
    dual_clip: float | None = None,
) -> SurrogateLoss:
    """Return `max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))` per token.

    Without both bounds it is the importance-weighted policy gradient, `-A r`.

    Args:
        log_ratio: Log of r, with gradient.
        advantages: A.
        clip_low: How far the ratio may fall at tokens whose loss would become lower; None means unbounded.
        clip_high: How far it may rise at tokens whose loss would become lower; None means unbounded.
        dual_clip: Where A < 0, bound the loss by `-A * dual_clip`, so that a token that became far more likely
            than it was does not dominate; None is off.
    """
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * _within(
        ratio, None if clip_low is None else 1 - clip_low, None if clip_high is None else 1 + clip_high
    )
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
    outside: Literal["clip", "drop"] = "clip",
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
        outside: Beyond these bounds the weight is the nearer one, or 0.
    """
    ratio = torch.exp(log_ratio.detach())
    weight = ratio.clamp(weight_low, weight_high)
    clipped = weight != ratio
    if outside == "drop":
        weight = torch.where(clipped, 0.0, ratio)
    if applies is not None:
        weight = torch.where(applies, weight, 1.0)
        clipped = clipped & applies
    return SurrogateLoss(-weight * advantages * logprobs, clipped)


def sapo_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> SurrogateLoss:
    """Return `-A sigmoid(tau (r - 1)) 4 / tau` per token (SAPO, arXiv:2511.20347, equation 5; verl, TRL, AReaL).

    The gate's slope is 1 at r = 1, so that on-policy it has the gradient of `-A r`.

    Args:
        log_ratio: Log of r, with gradient.
        advantages: A.
        tau_positive: tau where A > 0.
        tau_negative: tau elsewhere.
    """
    tau = _either(advantages > 0, tau_positive, tau_negative, advantages)
    gate = torch.sigmoid(tau * (torch.exp(log_ratio) - 1)) * 4 / tau
    return SurrogateLoss(-advantages * gate, torch.zeros_like(gate, dtype=torch.bool))


def quadratic_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, coefficient: float = 0.1
) -> SurrogateLoss:
    """Return `-A lp + coefficient / 2 (lp - old)^2` per token (Kimi 1.5, arXiv:2501.12599, equation 3; verl's dro).

    Args:
        logprobs: lp, with gradient.
        old_logprobs: old.
        advantages: A.
        coefficient: Weight of the move (tau in Kimi 1.5, beta in DRO).
    """
    move = (logprobs - old_logprobs).square()
    loss = -advantages * logprobs + 0.5 * coefficient * move
    return SurrogateLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def cpgd_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> SurrogateLoss:
    """Return `-A lp` per token, with lp kept from going further in A's direction (CPGD, arXiv:2505.12504; siiRL).

    At most `old + log(1 + clip_high)` where A > 0, at least `old + log(1 - clip_low)` elsewhere. It bounds what PPO
    bounds, and has no ratio that could make the gradient of what lies within large.

    Args:
        logprobs: lp, with gradient.
        old_logprobs: old.
        advantages: A.
        clip_low: How far the ratio may fall.
        clip_high: How far it may rise.
    """
    rises = torch.minimum(logprobs, old_logprobs + math.log1p(clip_high))
    falls = torch.maximum(logprobs, old_logprobs + math.log1p(-clip_low))
    kept = torch.where(advantages > 0, rises, falls)
    return SurrogateLoss(-advantages * kept, kept.detach() != logprobs.detach())


def dppo_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    low: float = 0.2,
    high: float = 0.2,
    cap: float | None = 20.0,
    penalty: float = 0.0,
    form: Literal["logprob", "ratio"] = "logprob",
    two_sided: bool = False,
) -> SurrogateLoss:
    """Return the policy gradient of tokens inside a trust region of probabilities (DPPO, arXiv:2602.04879).

    A token whose probability p has moved too far in the direction of its advantage has no gradient: with `tv` where
    p - p_old > high and A > 0, or p - p_old < -low and A <= 0; with `kl` where the binary KL(old || new) of the token
    against all others is above that.

    Args:
        logprobs: Log of p, with gradient.
        old_logprobs: Log of p_old.
        advantages: A.
        divergence: What is bounded.
        low: Bound where A <= 0.
        high: Bound where A > 0.
        cap: Largest weight r of a token; None means unbounded.
        penalty: Weight of `(lp - old)^2`, of every token (prime-rl).
        form: `-sg(min(r, cap)) A lp` (verl, slime), or `-r A` (prime-rl): their gradients are equal below the cap.
        two_sided: Whether both bounds hold whatever the advantage's sign (INTELLECT's IPO, prime-rl before DPPO).
    """
    outside = _has_left(logprobs.detach(), old_logprobs, advantages, divergence, low, high)
    if two_sided:
        # Tokens that became likelier have the bound of good tokens, the others that of bad ones.
        rose = torch.where(logprobs.detach() > old_logprobs, 1.0, -1.0)
        outside = _has_left(logprobs.detach(), old_logprobs, rose, divergence, low, high)
    ratio = torch.exp((logprobs - old_logprobs).clamp(-_BOUND, _BOUND))
    weight = ratio if cap is None else ratio.clamp(max=cap)
    loss = -advantages * (weight if form == "ratio" else weight.detach() * logprobs)
    loss = torch.where(outside, 0.0, loss)
    if penalty:
        loss = loss + penalty * (logprobs - old_logprobs).square()
    return SurrogateLoss(loss, outside)


def _has_left(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    divergence: Literal["tv", "kl"],
    low: float,
    high: float,
) -> Tensor:
    probability, before = logprobs.exp(), old_logprobs.exp()
    if divergence == "tv":
        moved = probability - before
        return torch.where(advantages > 0, moved > high, moved < -low)
    others = torch.log((1 - before + 1e-8) / (1 - probability + 1e-8))
    distance = before * (old_logprobs - logprobs) + (1 - before) * others
    too_far = torch.where(advantages > 0, distance > high, distance > low)
    return too_far & torch.where(advantages > 0, probability > before, probability < before)


def geometric_surrogate(log_ratio: Tensor, advantages: Tensor) -> SurrogateLoss:
    """Return `-A r` of the geometric mean of clipped ratios (GMPO, arXiv:2507.20673, equation 4).

    Args:
        log_ratio: Log of that mean, in token form: see `ratio.clipped_difference` and `ratio.log_ratio`.
        advantages: A.
    """
    loss = -advantages * torch.exp(log_ratio)
    return SurrogateLoss(loss, torch.zeros_like(loss, dtype=torch.bool))


def vespo_surrogate(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    k_positive: float = 2.0,
    rate_positive: float = 3.0,
    k_negative: float = 3.0,
    rate_negative: float = 2.0,
) -> SurrogateLoss:
    """Return `-sg(w^k exp(l (1 - w))) A lp` per token, with the ratio w of the whole episode (VESPO, as in TRL).

    Args:
        logprobs: lp, with gradient.
        log_ratio: Log of w, the sum over the episode.
        advantages: A.
        k_positive: k where A >= 0.
        rate_positive: l there.
        k_negative: k elsewhere.
        rate_negative: l there.
    """
    log_weight = log_ratio.detach().clamp(-18.420681, _BOUND)  # w is at least 1e-8
    weight = log_weight.exp()
    good = advantages >= 0
    k = _either(good, k_positive, k_negative, advantages)
    rate = _either(good, rate_positive, rate_negative, advantages)
    kernel = torch.exp(rate + k * log_weight - rate * weight)
    return SurrogateLoss(-kernel * advantages * logprobs, torch.zeros_like(kernel, dtype=torch.bool))


def positive_nll(logprobs: Tensor, scores: Tensor, *, score_threshold: float = 0.0) -> Tensor:
    """Return `-lp` per token of the episodes that did well, 0 elsewhere (VAPO, arXiv:2504.05118, equation 10).

    Args:
        logprobs: lp, with gradient, `[rows, tokens]`.
        scores: Return of each row's episode, `[rows]`.
        score_threshold: An episode did well if its return is above this.
    """
    return torch.where((scores > score_threshold)[:, None], -logprobs, 0.0)


def value_surrogate(
    values: Tensor,
    returns: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> SurrogateLoss:
    """Return the critic's loss per token: half the squared error, or Huber's.

    Args:
        values: Values with gradient.
        returns: What they should be.
        old_values: Values at the start of the update.
        clip: Take the larger of the errors of `values` and of `values` kept within `clip` of `old_values`.
        huber_delta: Where the error becomes linear (AReaL: 10); None is never.

    Raises:
        ValueError: If `clip` is given without `old_values`.
    """
    error = _error(values - returns, huber_delta)
    clipped = torch.zeros_like(values, dtype=torch.bool)
    if clip is not None:
        if old_values is None:
            raise ValueError("a clipped value loss needs the values at the start of the update")
        kept_near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        bounded = _error(kept_near - returns, huber_delta)
        clipped = bounded > error
        error = torch.maximum(error, bounded)
    return SurrogateLoss(0.5 * error, clipped)


def _error(difference: Tensor, delta: float | None) -> Tensor:
    """Return the squared difference, continued linearly beyond delta (Huber)."""
    if delta is None:
        return difference.square()
    far = difference.abs()
    return torch.where(far < delta, difference.square(), 2 * delta * (far - 0.5 * delta))


def _either(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """Return the one number or the other, in the type of numbers of `like`."""
    return torch.where(condition, torch.full_like(like, first), torch.full_like(like, second))


def _within(values: Tensor, low: float | None, high: float | None) -> Tensor:
    return values if low is None and high is None else values.clamp(low, high)
