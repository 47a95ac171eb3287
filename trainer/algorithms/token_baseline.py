"""The optimal token baseline: the mean return from each token on, weighted by the gradient before it.

As in verl (`optimal_token_baseline`); it needs the sum of squared probabilities over the vocabulary at each token,
which backends give as entropies of order two.
"""

import torch
from torch import Tensor


def optimal_token_baseline_advantages(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    squared_probabilities: Tensor,
    *,
    weights: Tensor | None = None,
    zero_tail: bool = True,
    epsilon: float = 1e-8,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns, float64 `[rows, tokens]`, zero outside the mask.

    At the t-th sampled token of the members of a group the baseline is `sum(G_t W_t) / sum(W_t)`, with the return G_t
    from it on and `W_t = sum over j <= t of (1 - 2 p_j + sum of squared probabilities at j)`, which stands for the
    squared norm of the gradient so far.

    Args:
        rewards: Reward on each token, `[rows, tokens]`.
        mask: True where the policy sampled the token; sampled tokens are compared by their number, whatever lies
            between them (verl's multi-turn form, equal to the other where nothing does).
        groups: Group of each row, `[rows]`; a row that is alone has no baseline.
        logprobs: Log of p.
        squared_probabilities: Sum over the vocabulary.
        weights: Importance weight of each token, squared into W; none if None.
        zero_tail: Use no baseline at tokens behind the end of the group's second longest row.
        epsilon: Added to the sum of the W.
    """
    rewards = torch.where(mask, rewards.double(), 0.0)
    energy = 1 - 2 * logprobs.double().exp() + squared_probabilities.double()
    if weights is not None:
        energy = energy * weights.double().square()
    energy = torch.where(mask, energy, 0.0).cumsum(dim=1)
    returns = rewards.flip(1).cumsum(1).flip(1)
    baselines = torch.zeros_like(returns)
    lengths = mask.sum(dim=1)
    for group in torch.unique(groups):
        members = ((groups == group) & (lengths > 0)).nonzero(as_tuple=True)[0]
        if len(members) < 2:
            continue
        longest, second = lengths[members].topk(2).values.tolist()
        baseline = torch.zeros(2, int(longest), dtype=torch.float64)
        for row in members:
            here = mask[row]
            count = int(lengths[row])
            baseline[0, :count] += returns[row, here] * energy[row, here]
            baseline[1, :count] += energy[row, here]
        level = baseline[0] / (baseline[1] + epsilon)
        if zero_tail:
            level[int(second) :] = 0.0
        for row in members:
            baselines[row, mask[row]] = level[: int(lengths[row])]
    return torch.where(mask, returns - baselines, 0.0), returns
