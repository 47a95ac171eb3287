"""Advantages: discounted returns, relative to a group, or from a critic. Statistics are taken in float64.

Several rewards are each relative to its group with GDPO (arXiv:2601.05242).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.modes import Baseline, GaeMask, ReturnMask, Scale, WhitenForm
from rollgym.trainer.core.numbers import NO_DEVIATION


def token_returns(
    rewards: Tensor, mask: Tensor, *, discount: float = 1.0, return_mask: ReturnMask = "skip"
) -> Tensor:
    """Return the discounted rewards from each sampled token on, float64 `[rows, tokens]`, zero outside the mask.

    REINFORCE and REINFORCE++ (arXiv:2501.03262) before it whitens.

    Args:
        rewards: Reward on each token; those outside the mask are not read.
        mask: True where the policy sampled the token.
        discount: Gamma.
        return_mask: What is made of a token outside the mask: `skip` passes over it (verl), `none` discounts by it as
            by any other (ROLL, slime, OpenRLHF), `reset` forgets all that comes after it, so that a reward reaches
            its own turn only (verl-agent, verl before 2026).
    """
    rewards = torch.where(mask, rewards.double(), 0.0)
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for index in reversed(range(rewards.shape[1])):
        here = mask[:, index]
        ahead = rewards[:, index] + discount * running
        returns[:, index] = torch.where(here, ahead, 0.0)
        match return_mask:
            case "skip":
                running = torch.where(here, ahead, running)
            case "none":
                running = ahead
            case "reset":
                running = torch.where(here, ahead, 0.0)
            case _:
                assert_never(return_mask)
    return returns


class GroupStatistics(NamedTuple):
    """What a group's scores have in common, each repeated for every member, `[scores]`."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_statistics(
    scores: Tensor, groups: Tensor, counts: Tensor | None = None, *, biased: bool = False
) -> GroupStatistics:
    """Return size, mean and standard deviation of each score's group.

    Args:
        scores: One number per trajectory (or per step), `[scores]`.
        groups: Group of each score; any integers.
        counts: How often each score counts; once if None.
        biased: Divide squares by n, not by n - 1.
    """
    scores = scores.double()
    _, group = torch.unique(groups, return_inverse=True)
    counts = torch.ones_like(scores) if counts is None else counts.double()
    buckets = scores.new_zeros(int(group.max()) + 1 if len(group) else 0)
    size = buckets.index_add(0, group, counts)
    mean = buckets.index_add(0, group, counts * scores) / size.clamp(min=1)
    deviation = scores - mean[group]
    variance = buckets.index_add(0, group, counts * deviation.square()) / (size - int(not biased)).clamp(
        min=1
    )
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
    biased: bool = False,
    lengths: Tensor | None = None,
    greedy: Tensor | None = None,
    shift: float = 0.0,
) -> Tensor:
    """Return each score relative to its group, float64 `[scores]`.

    GRPO is mean and group_std; Dr. GRPO mean and none; RLOO leave_one_out and none; LitePPO mean and batch_std; OPO
    length_weighted and none; ReMax greedy and none; pass@k second_best and group_std; MaxRL mean and group_mean;
    NeMo-RL's normalised leave-one-out leave_one_out and rest_std. What is divided by a deviation is 0 where all scores
    are equal, not a quotient of rounding errors.

    Args:
        scores: One number per trajectory (or per step).
        groups: Group of each score; any integers.
        baseline: What is subtracted.
        scale: What the difference is divided by: the deviation of the group, of the batch, of the other members of
            the group (if those are equal the difference stays as it is), of all differences of the batch (AReaL),
            or the group's mean if positive (arXiv:2602.02710).
        singleton: Advantage in a group of one: 0, or the score as it is. Without a baseline groups of one are
            treated like any other. A score that counts several times does not form a group of one.
        epsilon: Added to the deviation.
        counts: How often each score counts in the statistics; once if None.
        biased: Deviations with n, not n - 1.
        lengths: Sampled tokens of each, for baseline `length_weighted`.
        greedy: Score of the greedy episode of each one's group, for baseline `greedy`.
        shift: Added to the baseline: below 0 what went well weighs more (AsymRE, arXiv:2506.20520).

    Raises:
        ValueError: If the baseline reads what is not given.
    """
    scores = scores.double()
    size, mean, std = group_statistics(scores, groups, counts, biased=biased)
    match baseline:
        case "mean":
            advantages = scores - mean
        case "leave_one_out":
            advantages = (scores - mean) * size / (size - 1).clamp(min=1)
        case "length_weighted":
            advantages = scores - _group_means(scores, groups, _given(lengths, "lengths"))
        case "greedy":
            advantages = scores - _given(greedy, "the greedy episodes' scores")
        case "second_best":
            advantages = _lead_of_the_best(scores, groups)
        case "batch_mean":
            advantages = scores - group_statistics(scores, torch.zeros_like(groups), counts).mean
        case "none":
            advantages = scores
        case _:
            assert_never(baseline)
    advantages = advantages - shift
    match scale:
        case "none":
            pass
        case "group_std":
            advantages = _divided(advantages, std, epsilon)
        case "batch_std":
            whole = group_statistics(scores, torch.zeros_like(groups), counts, biased=biased)
            advantages = _divided(advantages, whole.std, epsilon)
        case "centred_std":
            advantages = _divided(advantages, _root_mean_square(advantages, counts, biased=biased), epsilon)
        case "group_mean":
            advantages = _divided(advantages, mean, epsilon)
        case "rest_std":
            rest = _deviation_of_the_rest(scores, groups, biased=biased)
            advantages = torch.where(rest > NO_DEVIATION, advantages / (rest + epsilon), advantages)
        case _:
            assert_never(scale)
    if baseline not in ("none", "greedy", "batch_mean"):
        advantages = torch.where(size == 1, scores if singleton == "raw" else 0.0, advantages)
    return advantages


def _divided(differences: Tensor, by: Tensor, epsilon: float) -> Tensor:
    return torch.where(by > NO_DEVIATION, differences / (by + epsilon), 0.0)


def _root_mean_square(differences: Tensor, counts: Tensor | None, *, biased: bool) -> Tensor:
    counts = torch.ones_like(differences) if counts is None else counts.double()
    total = (counts * differences.square()).sum()
    return (total / (counts.sum() - int(not biased)).clamp(min=1)).sqrt()


def _deviation_of_the_rest(scores: Tensor, groups: Tensor, *, biased: bool) -> Tensor:
    """Return, for each score, the deviation of the others of its group; 0 where fewer than two are left."""
    size, mean, std = group_statistics(scores, groups, biased=True)
    rest = size - 1
    # What is left of the sum of squares without one member (Welford's update, backwards).
    squares = size * std.square() - (scores - mean).square() * size / rest.clamp(min=1)
    left = (rest - int(not biased)).clamp(min=1)
    return torch.where(rest > 1, (squares.clamp(min=0) / left).sqrt(), 0.0)


def _given(numbers: Tensor | None, what: str) -> Tensor:
    if numbers is None:
        raise ValueError(f"the baseline reads {what}, which are not given")
    return numbers.double()


def _group_means(scores: Tensor, groups: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of each score's group; the plain one where all weights are 0."""
    _, group = torch.unique(groups, return_inverse=True)
    weights = weights.clamp(min=1e-12)
    totals = scores.new_zeros(int(group.max()) + 1 if len(group) else 0)
    weight = totals.index_add(0, group, weights)
    return (totals.index_add(0, group, weights * scores) / weight)[group]


def _lead_of_the_best(scores: Tensor, groups: Tensor) -> Tensor:
    """Return how far the best of each group is ahead of the second best, for it alone (pass@k, arXiv:2503.19595)."""
    leads = torch.zeros_like(scores)
    for group in torch.unique(groups):
        members = (groups == group).nonzero(as_tuple=True)[0]
        if len(members) > 1:
            best, second = scores[members].topk(2).indices
            leads[members[best]] = scores[members[best]] - scores[members[second]]
    return leads


def informative_factor(
    scores: Tensor, groups: Tensor, count: Literal["none", "informative", "nonzero_scores"]
) -> float:
    """Return what GPG multiplies advantages by: all episodes over those that say something (arXiv:2504.02546, 3.2).

    Args:
        scores: Return of each episode.
        groups: Its group.
        count: `informative` counts episodes in groups of unequal returns, `nonzero_scores` those whose return is not
            0 (verl); `none` is 1.
    """
    if count == "none":
        return 1.0
    says = scores != 0 if count == "nonzero_scores" else group_statistics(scores, groups).std > NO_DEVIATION
    return len(scores) / max(int(says.sum()), 1)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
    gae_mask: GaeMask = "skip",
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return GAE and returns of every token of the mask, float64 `[rows, tokens]`.

    Value, error trace and discount are carried unchanged across observation tokens: the result at sampled tokens is
    plain GAE of the sequence without the others. Both results are zero outside the mask.

    Args:
        rewards: Reward on each token.
        values: Value of the state before each token; never read outside the mask, unless `gae_mask` is `none`.
        mask: True where the policy sampled the token.
        gamma: Discount per sampled token.
        gae_lambda: Decay of the error trace per sampled token, or one for each row, `[rows]` (see
            `length_adaptive_lambda`).
        gae_mask: `none` steps through tokens outside the mask, padding too, as through any other, with reward 0 and the
            values given there (ROLL; OpenRLHF sets them to 0 before).
        last_values: Value of the state behind each row, `[rows]`: that of the observation after the last action where
            an episode was cut off, 0 if the episode ended (Gymnasium's meaning of `truncated`). None is 0 for all.
    """
    rewards = torch.where(mask, rewards.double(), 0.0)
    values = torch.where(mask, values.double(), 0.0) if gae_mask == "skip" else values.double()
    steps = mask if gae_mask == "skip" else torch.ones_like(mask)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(values.shape[0])
    next_value = values.new_zeros(values.shape[0]) if last_values is None else last_values.to(values)
    for index in reversed(range(values.shape[1])):
        here = steps[:, index]
        error = rewards[:, index] + gamma * next_value - values[:, index]
        running = torch.where(here, error + gamma * gae_lambda * running, running)
        next_value = torch.where(here, values[:, index], next_value)
        advantages[:, index] = torch.where(mask[:, index], running, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def length_adaptive_lambda(mask: Tensor, alpha: float) -> Tensor:
    """Return lambda of each row, `1 - 1 / (alpha n)` with its n sampled tokens, float64 `[rows]`, at least 0.

    The errors of long answers reach as far back as those of short ones (VAPO, arXiv:2504.05118, section 4.2).
    """
    return (1 - 1 / (alpha * mask.sum(dim=1).clamp(min=1).double())).clamp(min=0.0)


def bi_level_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turn_end: Tensor,
    *,
    turn_discount: float,
    gamma: float,
    gae_lambda: float,
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
        gamma: Discount per sampled token of a turn.
        gae_lambda: Decay of the error trace, on both levels.
    """
    turn_end = turn_end & mask
    _, turn_returns = generalized_advantages(
        rewards, values, turn_end, gamma=turn_discount, gae_lambda=gae_lambda
    )
    values = torch.where(mask, values.double(), 0.0)
    advantages = torch.zeros_like(values)
    running = values.new_zeros(values.shape[0])
    next_value = values.new_zeros(values.shape[0])
    for index in reversed(range(values.shape[1])):
        here, last = mask[:, index], turn_end[:, index]
        running = torch.where(last, 0.0, running)
        target = torch.where(last, turn_returns[:, index], gamma * next_value)
        error = target - values[:, index]
        running = torch.where(here, error + gamma * gae_lambda * running, running)
        next_value = torch.where(here, values[:, index], next_value)
        advantages[:, index] = torch.where(here, running, 0.0)
    return advantages, torch.where(mask, advantages + values, 0.0)


def whitened(
    values: Tensor,
    mask: Tensor,
    *,
    unbiased: bool = True,
    epsilon: float = 1e-8,
    form: WhitenForm = "variance",
) -> Tensor:
    """Return values with mean 0 and deviation 1 over the masked tokens; zero outside the mask.

    Every token counts once, so long rows weigh more.

    Args:
        values: A number per token.
        mask: Which count.
        unbiased: Divide squares by n - 1 (verl), or by n (OpenRLHF, AReaL).
        epsilon: Keeps the division finite.
        form: Where epsilon is: added to the variance (verl), to the deviation (AReaL), or the variance's floor
            (OpenRLHF). `mean` takes the mean off and leaves the deviation (OpenRLHF's no_std_norm).
    """
    chosen = torch.where(mask, values.double(), 0.0)
    count = mask.sum()
    mean = chosen.sum() / count.clamp(min=1)
    deviation = torch.where(mask, chosen - mean, 0.0)
    variance = deviation.square().sum() / (count - int(unbiased)).clamp(min=1)
    match form:
        case "variance":
            return deviation * torch.rsqrt(variance + epsilon)
        case "deviation":
            return deviation / (variance.sqrt() + epsilon)
        case "floor":
            return deviation * torch.rsqrt(variance.clamp(min=epsilon))
        case "mean":
            return deviation
        case _:
            assert_never(form)


def gdpo_advantages(
    scores: Tensor,
    groups: Tensor,
    *,
    weights: Sequence[float] | None = None,
    scale: Scale = "group_std",
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = 1e-6,
) -> Tensor:
    """Return the weighted sum of each reward's advantages in its group, float64 `[trajectories]` (equations 4 and 5).

    The batch's normalisation that follows (equation 6) is `advantages.whitened` over tokens in verl, and
    `(A - mean) / (deviation + 1e-4)` over trajectories in TRL: `group_advantages` with one group for all.

    Args:
        scores: A row for each reward, `[rewards, trajectories]`.
        groups: Group of each trajectory.
        weights: Of each reward; 1 if None.
        scale: As in `group_advantages`, and so are the following.
        singleton: In a group of one.
        epsilon: Added to deviations.
    """
    factors = [1.0] * len(scores) if weights is None else weights
    total = torch.zeros(scores.shape[1:], dtype=torch.float64)
    for factor, each in zip(factors, scores, strict=True):
        total += factor * group_advantages(each, groups, scale=scale, singleton=singleton, epsilon=epsilon)
    return total
