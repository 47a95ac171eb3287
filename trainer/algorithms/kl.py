"""Estimators of the Kullback-Leibler divergence from sampled tokens."""

from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import KLEstimator

_LOG_RATIO_LIMIT = 20.0
_K3_LIMIT = 10.0


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    estimator: KLEstimator,
    *,
    straight_through: bool = False,
    log_ratio: Tensor | None = None,
    gradient_cap: float | None = None,
    bounded: bool = True,
    limit: float | None = None,
) -> Tensor:
    """Return a per-token estimate of KL(policy || reference), with d = logprobs - reference.

    `k1` = d; `k2` = d^2 / 2; `k3` = exp(-d) - 1 + d; `abs` = |d|. For `k3`, d is clamped to +-20 and
    the result to +-10, so that one outlier cannot overflow.

    As a loss, `k2` has the right gradient on-policy and `k3` a biased one of low variance (k1's is zero in
    expectation). `straight_through` keeps the estimator's value and takes the gradient of `k2`.

    Args:
        logprobs: Log-probabilities of the sampled tokens under the policy.
        reference: Their log-probabilities under the reference policy.
        estimator: Which estimate.
        straight_through: Take the gradient of `k2`, whatever the value.
        log_ratio: Log of the ratio to the policy that tokens are taken to be of, with gradient: the estimate times the
            ratio is unbiased off-policy (DeepSeek-V3.2, section 3.1). None: without this factor.
        gradient_cap: With `straight_through` and `log_ratio`, the detached ratio multiplies the gradient alone, and is
            at most this (OpenRLHF: 10). None: it multiplies value and gradient.
        bounded: Whether `k3` is clamped (verl); slime and TRL do not.
        limit: Largest magnitude of what any estimator gives (AReaL, OpenRLHF, NeMo-RL: 10); None is none.
    """
    difference = logprobs - reference
    match estimator:
        case "k1":
            value = difference
        case "k2":
            value = difference.square() / 2
        case "abs":
            value = difference.abs()
        case "k3" if bounded:
            near = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
            value = (torch.exp(-near) - 1 + near).clamp(-_K3_LIMIT, _K3_LIMIT)
        case "k3":
            value = torch.exp(-difference) - 1 + difference
        case _:
            assert_never(estimator)
    if limit is not None:
        value = value.clamp(-limit, limit)
    weighted = gradient_cap is not None and log_ratio is not None
    if straight_through:
        gradient = difference.square() / 2
        if gradient_cap is not None and log_ratio is not None:
            gradient = gradient * log_ratio.detach().exp().clamp(max=gradient_cap)
        value = value.detach() + gradient - gradient.detach()
    return value if log_ratio is None or weighted else value * log_ratio.exp()


def centred_kl_advantages(logprobs: Tensor, reference: Tensor, mask: Tensor, coefficient: float) -> Tensor:
    """Return what a KL penalty adds to the advantage of each token, `[rows, tokens]`, zero outside the mask.

    `c (mean(d) - d)` with d = logprobs - reference and the mean over all tokens of the batch: a penalty with a
    baseline, which costs nothing in the mean (tinker-cookbook).

    Args:
        logprobs: Log-probabilities under the policy that sampled, or as the update begins.
        reference: Log-probabilities under the reference policy.
        mask: Which tokens count.
        coefficient: c.
    """
    difference = torch.where(mask, logprobs.detach().double() - reference.detach().double(), 0.0)
    mean = difference.sum() / mask.sum().clamp(min=1)
    return torch.where(mask, coefficient * (mean - difference), 0.0)
