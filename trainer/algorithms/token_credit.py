"""Advantages of single tokens, by kind.

The optimal token baseline is the mean return from each token on, weighted by the gradient before it, as in verl
(`optimal_token_baseline`); it needs the sum of squared probabilities over the vocabulary at each token, which backends
give as entropies of order two.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantage import TokenCredit
from rollgym.trainer.algorithms.advantages import (
    bi_level_advantages,
    generalized_advantages,
    group_statistics,
    length_adaptive_lambda,
    token_returns,
)
from rollgym.trainer.algorithms.batch import required
from rollgym.trainer.algorithms.turn_credit import greedy_scores

if TYPE_CHECKING:
    from rollgym.trainer.algorithms.advantage_settings import (
        BiLevelGaeAdvantage,
        GaeAdvantage,
        OptimalTokenAdvantage,
        TokenReturnAdvantage,
    )


def optimal_token_baseline_advantages(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    squared_probabilities: Tensor,
    *,
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
        zero_tail: Use no baseline at tokens behind the end of the group's second longest row.
        epsilon: Added to the sum of the W.
    """
    rewards = torch.where(mask, rewards.double(), 0.0)
    energy = 1 - 2 * logprobs.double().exp() + squared_probabilities.double()
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


def return_credit(advantage: "TokenReturnAdvantage", credit: TokenCredit) -> tuple[Tensor, None]:
    """Give every token the return from it on, less a baseline of its episode."""
    stream, mask = credit.stream, credit.rows.mask
    dense = stream.gather(credit.rewards)
    if advantage.return_mask == "none":
        advantages = token_returns(credit.rewards, mask, discount=advantage.gamma, return_mask="none")
    else:
        advantages = stream.scatter(token_returns(dense, stream.sampled(), discount=advantage.gamma), mask)
    if advantage.baseline != "none":
        worth = _baseline(advantage, credit, dense)[credit.rows.trajectory]
        advantages = torch.where(mask, advantages - worth[:, None], 0.0)
    return advantages, None


def _baseline(advantage: "TokenReturnAdvantage", credit: TokenCredit, rewards: Tensor) -> Tensor:
    """Return what is taken off the returns of each trajectory's tokens, `[trajectories]`."""
    if advantage.baseline == "greedy":
        return greedy_scores(credit.shaping, credit.batch).to(rewards.device)
    groups = torch.tensor(credit.batch.groups, dtype=torch.int64, device=rewards.device)
    return group_statistics(rewards.sum(dim=1), groups).mean


def optimal_token_credit(advantage: "OptimalTokenAdvantage", credit: TokenCredit) -> tuple[Tensor, None]:
    """Give every token the return from it on, less the baseline of smallest variance there."""
    stream, rows = credit.stream, credit.rows
    advantages, _ = optimal_token_baseline_advantages(
        stream.gather(credit.rewards),
        stream.sampled(),
        torch.tensor(credit.batch.groups, dtype=torch.int64),
        stream.gather(required(rows.old_logprobs, "old_logprobs")),
        stream.gather(required(rows.squared_probabilities, "squared_probabilities")),
        zero_tail=advantage.zero_tail,
        epsilon=advantage.epsilon,
    )
    return stream.scatter(advantages, rows.mask), None


def gae_credit(advantage: "GaeAdvantage", credit: TokenCredit) -> tuple[Tensor, Tensor]:
    """Give every token its generalised advantage, and say what the critic should have said."""
    stream, rows = credit.stream, credit.rows
    values = required(rows.values, "values")
    if advantage.gae_mask == "none":
        return _generalized(
            advantage, credit.rewards, torch.where(rows.mask, values.double(), 0.0), rows.mask
        )
    last = required(rows.last_values, "last_values") if advantage.bootstrap_truncated else None
    advantages, returns = _generalized(
        advantage, stream.gather(credit.rewards), stream.gather(values), stream.sampled(), last
    )
    return stream.scatter(advantages, rows.mask), stream.scatter(returns, rows.mask)


def _generalized(
    advantage: "GaeAdvantage",
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return GAE and the critic's targets; the targets use the critic's own lambda if one is set.

    With `gae_mask: none` it decays over observation tokens, row by row (OpenRLHF); padding behind a row costs nothing.
    """
    gae_lambda: float | Tensor = advantage.gae_lambda
    if advantage.length_adaptive is not None:
        gae_lambda = length_adaptive_lambda(mask, advantage.length_adaptive)
    found = generalized_advantages(
        rewards,
        values,
        mask,
        gamma=advantage.gamma,
        gae_lambda=gae_lambda,
        gae_mask=advantage.gae_mask,
        last_values=last_values,
    )
    if advantage.critic_gae_lambda is None:
        return found
    apart = generalized_advantages(
        rewards,
        values,
        mask,
        gamma=advantage.gamma,
        gae_lambda=advantage.critic_gae_lambda,
        gae_mask=advantage.gae_mask,
        last_values=last_values,
    )
    return found[0], apart[1]


def bi_level_credit(advantage: "BiLevelGaeAdvantage", credit: TokenCredit) -> tuple[Tensor, Tensor]:
    """Give every token its generalised advantage over turns, and then over the tokens of its turn."""
    stream, rows = credit.stream, credit.rows
    advantages, returns = bi_level_advantages(
        stream.gather(credit.rewards),
        stream.gather(required(rows.values, "values")),
        stream.sampled(),
        stream.flags(stream.turn_end),
        turn_discount=advantage.turn_discount,
        gamma=advantage.gamma,
        gae_lambda=advantage.gae_lambda,
    )
    return stream.scatter(advantages, rows.mask), stream.scatter(returns, rows.mask)
