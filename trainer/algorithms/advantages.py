"""Advantages: relative to a group, or from a critic. Statistics are taken in float64."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["group_std", "batch_std", "none"]

# A deviation up to this is rounding noise of equal scores.
NO_DEVIATION = 1e-6
_WHITEN_EPSILON = 1e-8


class GroupStatistics(NamedTuple):
    """What a group's scores have in common, each repeated for every member, `[scores]`."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_statistics(scores: Tensor, groups: Tensor, counts: Tensor | None = None) -> GroupStatistics:
    """Return size, mean and unbiased standard deviation of each score's group.

    Args:
        scores: One number per trajectory (or per step), `[scores]`.
        groups: Group of each score; any integers.
        counts: How often each score counts; once if None.
    """
    scores = scores.double()
    _, group = torch.unique(groups, return_inverse=True)
    counts = torch.ones_like(scores) if counts is None else counts.double()
    buckets = scores.new_zeros(int(group.max()) + 1 if len(group) else 0)
    size = buckets.index_add(0, group, counts)
    mean = buckets.index_add(0, group, counts * scores) / size.clamp(min=1)
    deviation = scores - mean[group]
    variance = buckets.index_add(0, group, counts * deviation.square()) / (size - 1).clamp(min=1)
    return GroupStatistics(size[group], mean[group], variance.sqrt()[group])


def group_advantages(
    scores: Tensor,
    groups: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group_std",
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = 1e-6,
    counts: Tensor | None = None,
) -> Tensor:
    """Return each score relative to its group, float64 `[scores]`.

    GRPO is mean and group_std; Dr. GRPO mean and none; RLOO leave_one_out and none; LitePPO mean and batch_std.
    Deviations are unbiased. What is divided by a deviation is 0 where all scores are equal, not a quotient of
    rounding errors.

    Args:
        scores: One number per trajectory (or per step).
        groups: Group of each score; any integers.
        baseline: What is subtracted.
        scale: What the difference is divided by.
        singleton: Advantage in a group of one: 0, or the score as it is. Without a baseline groups of one are
            no special case. A score that counts several times is no group of one.
        epsilon: Added to the deviation.
        counts: How often each score counts in the statistics; once if None.
    """
    scores = scores.double()
    size, mean, std = group_statistics(scores, groups, counts)
    match baseline:
        case "mean":
            advantages = scores - mean
        case "leave_one_out":
            advantages = (scores - mean) * size / (size - 1).clamp(min=1)
        case "none":
            advantages = scores
    if scale == "batch_std":
        std = group_statistics(scores, torch.zeros_like(groups), counts).std
    if scale != "none":
        advantages = torch.where(std > NO_DEVIATION, advantages / (std + epsilon), 0.0)
    if baseline != "none":
        advantages = torch.where(size == 1, scores if singleton == "raw" else 0.0, advantages)
    return advantages


def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, *, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Return GAE and returns that skip every token outside the mask, float64 `[rows, tokens]`.

    Value, error trace and discount are carried unchanged across observation tokens: the result at sampled tokens is
    plain GAE of the sequence without the others. Both results are zero outside the mask.

    Args:
        rewards: Reward on each token.
        values: Value of the state before each token; never read outside the mask.
        mask: True where the policy sampled the token.
        discount: Gamma, per sampled token.
        trace: Lambda, per sampled token.
    """
    rewards = torch.where(mask, rewards.double(), 0.0)
    values = torch.where(mask, values.double(), 0.0)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(values.shape[0])
    next_value = values.new_zeros(values.shape[0])
    for place in reversed(range(values.shape[1])):
        here = mask[:, place]
        error = rewards[:, place] + discount * next_value - values[:, place]
        running = torch.where(here, error + discount * trace * running, running)
        next_value = torch.where(here, values[:, place], next_value)
        advantages[:, place] = torch.where(here, running, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def bi_level_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turn_end: Tensor,
    *,
    turn_discount: float,
    token_discount: float,
    trace: float,
) -> tuple[Tensor, Tensor]:
    """Return GAE over turns, refined over the tokens of each turn, float64 `[rows, tokens]`.

    First GAE runs over the last tokens of the turns alone, which gives each turn its return. Then it runs backwards
    through each turn by itself, with that return as the reward of its last token.

    Args:
        rewards: Reward on each token; only those at turn ends are read.
        values: Value of the state before each token; never read outside the mask.
        mask: True where the policy sampled the token.
        turn_end: True on the last sampled token of each turn.
        turn_discount: Discount from one turn to the next.
        token_discount: Gamma, per sampled token of a turn.
        trace: Lambda, on both levels.
    """
    turn_end = turn_end & mask
    _, turn_returns = generalized_advantages(rewards, values, turn_end, discount=turn_discount, trace=trace)
    values = torch.where(mask, values.double(), 0.0)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(values.shape[0])
    next_value = values.new_zeros(values.shape[0])
    for place in reversed(range(values.shape[1])):
        here, last = mask[:, place], turn_end[:, place]
        running = torch.where(last, 0.0, running)
        target = torch.where(last, turn_returns[:, place], token_discount * next_value)
        error = target - values[:, place]
        running = torch.where(here, error + token_discount * trace * running, running)
        next_value = torch.where(here, values[:, place], next_value)
        advantages[:, place] = torch.where(here, running, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whitened(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Return values with mean 0 and deviation 1 over the masked tokens; zero outside the mask.

    Every token counts once, so long rows weigh more. `unbiased=False` divides by n (OpenRLHF).
    """
    chosen = torch.where(mask, values.double(), 0.0)
    count = mask.sum()
    mean = chosen.sum() / count.clamp(min=1)
    deviation = torch.where(mask, chosen - mean, 0.0)
    variance = deviation.square().sum() / (count - int(unbiased)).clamp(min=1)
    return deviation * torch.rsqrt(variance + _WHITEN_EPSILON)
