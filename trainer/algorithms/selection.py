"""Which tokens of an optimizer step are trained on. All functions read all of its sampled tokens at once.

Tensors are `[tokens]`, in an order that does not depend on how episodes lie in rows (see `TokenStream`): equal values
are told apart by their place in it.
"""

import torch
from torch import Tensor


def second_moment_mask(log_ratio: Tensor, threshold: float = 0.04) -> Tensor:
    """Return which tokens are kept: all but those that moved most, until the mean square of the rest is small enough.

    M2PO (arXiv:2510.01161, algorithm 1); as in AReaL one token stays even if it alone is too far.

    Args:
        log_ratio: `log p - log p_behaviour` of each token.
        threshold: The mean of its square must be below this.
    """
    moment = log_ratio.detach().double().square()
    order = torch.argsort(moment, descending=True, stable=True)
    # Mean of what is left when the first so many are dropped.
    rest = moment[order].flip(0).cumsum(0).flip(0)
    mean = rest / torch.arange(len(rest), 0, -1, device=rest.device)
    enough = (mean < threshold).nonzero(as_tuple=True)[0]
    dropped = int(enough[0]) if len(enough) else max(len(order) - 1, 0)
    kept = torch.ones_like(moment, dtype=torch.bool)
    kept[order[:dropped]] = False
    return kept


def covariances(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return what each token adds to the covariance of log-probability and advantage (arXiv:2505.22617, eq. 10)."""
    logprobs, advantages = logprobs.detach().double(), advantages.detach().double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_mask(
    covariance: Tensor,
    candidates: Tensor,
    *,
    fraction: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return which tokens are kept: a few are dropped at random of those of large covariance (Clip-Cov).

    Args:
        covariance: Of each token; see `covariances`.
        candidates: Which may be dropped: those that the surrogate does not clip anyhow.
        fraction: How many are dropped, as a part of all tokens; at least one.
        low: They are drawn from those whose covariance is above this
        high: and below this.
        generator: What they are drawn with; torch's own if None.
    """
    eligible = ((covariance > low) & (covariance < high) & candidates).nonzero(as_tuple=True)[0]
    count = min(max(int(fraction * len(covariance)), 1), len(eligible))
    drawn = torch.randperm(len(eligible), generator=generator)[:count].to(eligible.device)
    kept = torch.ones_like(covariance, dtype=torch.bool)
    kept[eligible[drawn]] = False
    return kept


def kl_cov_mask(covariance: Tensor, *, fraction: float = 2e-4) -> Tensor:
    """Return the tokens of largest covariance, so many as this part of all, at least one (KL-Cov)."""
    chosen = torch.zeros_like(covariance, dtype=torch.bool)
    if len(covariance):
        count = max(int(fraction * len(covariance)), 1)
        chosen[torch.argsort(covariance, descending=True, stable=True)[:count]] = True
    return chosen


def high_entropy_mask(entropy: Tensor, *, fraction: float = 0.2) -> Tensor:
    """Return the tokens whose entropy reaches the quantile above which lies this part of them (arXiv:2506.01939).

    As in TRL, of which `top_entropy_quantile` is the fraction.
    """
    if not len(entropy):
        return torch.zeros_like(entropy, dtype=torch.bool)
    ordered = entropy.detach().double().sort().values
    # torch.quantile takes no more than 16 million numbers.
    place = (1 - fraction) * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[below], ordered[above], place - below)
    return entropy >= threshold
