"""Losses of preferences: pure functions of the log-probabilities of whole replies.

They are means over a whole batch, and couple its rows: the two replies of a pair, and with KTO all of the batch. What
they read of a row is one number, the sum of its tokens' log-probabilities, so their gradients are a weight for each row
(`rollgym.trainer.learn.pipelines.preferences`), no matter which micro-batch or rank computes it.

If implementations differ, docs/pipelines.md names the chosen one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings


@dataclass(frozen=True, slots=True)
class Replies:
    """Replies under the policy and the reference, `[replies]` each.

    Attributes:
        logprobs: Sum of the log-probabilities of a reply's tokens, with gradient.
        tokens: Number of those tokens.
        reference: The same sums under the reference; zeros without a reference.
    """

    logprobs: Tensor
    tokens: Tensor
    reference: Tensor

    @property
    def log_ratio(self) -> Tensor:
        """How much likelier than under the reference."""
        return self.logprobs - self.reference

    @property
    def mean(self) -> Tensor:
        """Mean log-probability of a token."""
        return self.logprobs / self.tokens.clamp(min=1)


@dataclass(frozen=True, slots=True)
class PreferenceResult:
    """What a batch comes to.

    Attributes:
        loss: The loss of the batch, one number with gradient.
        chosen: The implicit rewards of the good replies, `[good]`, without gradient.
        rejected: Those of the others, `[bad]`.
    """

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def strength(settings: PreferenceLossSettings) -> float:
    """Return the loss's beta: the one that is set, or 2.0 for SimPO (its section 4.1) and 0.1 for the others."""
    if settings.beta is not None:
        return settings.beta
    return 2.0 if settings.kind == "simpo" else 0.1


def paired_loss(settings: PreferenceLossSettings, chosen: Replies, rejected: Replies) -> PreferenceResult:
    """Return the mean loss of pairs; `chosen` and `rejected` have the pairs in one order.

    - dpo: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; with label smoothing its conservative form (Mitchell
      2023).
    - robust: Chowdhury et al. 2024 (2403.00409), equation 11: an unbiased estimate where labels are flipped.
    - hinge: Zhao et al. 2023 (SLiC-HF, 2305.10425), equation 1, on log-ratios as Liu et al. 2024 (2309.06657) have it.
    - ipo: Azar et al. 2023 (2310.12036), equation 17.
    - orpo: Hong et al. 2024 (2403.07691), equations 6 and 7; likelihood and odds are those of the reply.
    - simpo: Meng et al. 2024 (2405.14734), equation 6.
    """
    beta, smoothing = strength(settings), settings.label_smoothing
    difference = chosen.log_ratio - rejected.log_ratio
    rewards = beta * chosen.log_ratio, beta * rejected.log_ratio
    match settings.kind:
        case "dpo":
            loss = _smoothed(beta * difference, smoothing)
        case "robust":
            right, flipped = -logsigmoid(beta * difference), -logsigmoid(-beta * difference)
            loss = ((1.0 - smoothing) * right - smoothing * flipped) / (1.0 - 2.0 * smoothing)
        case "hinge":
            loss = torch.relu(1.0 - beta * difference)
        case "ipo":
            if settings.average:
                difference = chosen.log_ratio / chosen.tokens.clamp(min=1)
                difference = difference - rejected.log_ratio / rejected.tokens.clamp(min=1)
            loss = (difference - 1.0 / (2.0 * beta)).square()
        case "orpo":
            odds = _log_odds(chosen.mean) - _log_odds(rejected.mean)
            likelihood = -chosen.logprobs.sum() / chosen.tokens.sum().clamp(min=1)
            loss = likelihood - beta * logsigmoid(odds)
            rewards = beta * chosen.mean, beta * rejected.mean
        case "simpo":
            loss = _smoothed(beta * (chosen.mean - rejected.mean) - settings.margin, smoothing)
            rewards = beta * chosen.mean, beta * rejected.mean
        case _:
            raise ValueError(f"'{settings.kind}' is no loss of pairs")
    return PreferenceResult(loss.mean(), rewards[0].detach(), rewards[1].detach())


def unpaired_loss(
    settings: PreferenceLossSettings, replies: Replies, good: Tensor, others: Replies
) -> PreferenceResult:
    """Return KTO's loss: Ethayarajh et al. 2024 (arXiv:2402.01306), equation 8.

    Args:
        settings: Its numbers.
        replies: The replies of the batch.
        good: Which of them are desirable, bool `[replies]`.
        others: Prompts of the batch with replies to other prompts, whose mean log-ratio, not below zero, estimates how
            far the policy is from the reference (z0, section 4.1). No gradient flows through it.
    """
    zero = others.log_ratio.detach().mean().clamp(min=0.0)
    rewards = strength(settings) * replies.log_ratio
    shift = strength(settings) * zero
    value = torch.sigmoid(torch.where(good, rewards - shift, shift - rewards))
    weight = torch.where(good, settings.desirable_weight, settings.undesirable_weight)
    loss = (weight * (1.0 - value)).mean()
    return PreferenceResult(loss, rewards[good].detach(), rewards[~good].detach())


def bradley_terry_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | None = None, centre: float = 0.0
) -> Tensor:
    """Return the loss of a reward model: the mean negative log-likelihood of the order of pairs.

    Ouyang et al. 2022 (arXiv:2203.02155), equation 1; margins as in Touvron et al. 2023 (Llama 2, 2307.09288), equation
    2; the pull of rewards towards zero as in Eisenstein et al. 2023 (2312.09244), section 3.

    Args:
        chosen: Rewards of the better replies, `[pairs]`.
        rejected: Those of the others.
        margin: By how much each pair should differ; None: by nothing.
        centre: Weight of the mean square of the sum of a pair's rewards.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -logsigmoid(difference).mean()
    return loss + centre * (chosen + rejected).square().mean() if centre else loss


def _smoothed(logits: Tensor, smoothing: float) -> Tensor:
    loss = -logsigmoid(logits)
    if not smoothing:
        return loss
    return (1.0 - smoothing) * loss - smoothing * logsigmoid(-logits)


def _log_odds(logprob: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p, exactly near p = 0 and p = 1."""
    # A reply that is certain has infinite odds; no float says so, and no gradient could follow it.
    logprob = logprob.clamp(max=-1e-7)
    # log(1 - e^x), each form in the range in which it loses no digits (Maechler 2012). The form that is not selected
    # is computed at -1, because an infinite value there would make the gradient NaN.
    near = logprob > -0.6931471805599453
    small = torch.where(near, logprob, -1.0)
    large = torch.where(near, -1.0, logprob)
    return logprob - torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
