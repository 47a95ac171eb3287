"""The composition: the losses of a micro-batch, as the settings name their parts."""

import torch
from torch import Tensor

from rollgym.trainer.algorithms.aggregation import Denominators, Metrics, aggregate, collect, share
from rollgym.trainer.algorithms.batch import LossInputs, SurrogateInputs, required
from rollgym.trainer.algorithms.corrections import (
    banded,
    importance_weights,
    interpolated_logprobs,
    truncated,
)
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.losses import positive_nll, value_surrogate
from rollgym.trainer.algorithms.ratio import clipped_difference, log_ratio
from rollgym.trainer.algorithms.settings import AlgorithmSettings


def policy_loss(
    settings: AlgorithmSettings, inputs: LossInputs, denominators: Denominators
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the policy's loss; the shares of all micro-batches add up to the loss.

    Args:
        settings: The algorithm.
        inputs: The micro-batch. Nothing outside its mask is read, NaN included.
        denominators: Counts of everything that the optimizer step trains on, over all shards.
    """
    mask = inputs.mask
    logprobs = torch.where(mask, inputs.logprobs, 0.0)
    behaviour = torch.where(mask, inputs.behaviour_logprobs, 0.0)
    old = _proximal(settings, inputs, logprobs, behaviour)
    advantages = torch.where(mask, inputs.advantages, 0.0)
    ratio = log_ratio(
        logprobs,
        old,
        mask,
        inputs.turn_index,
        level=settings.ratio.level,
        clamp=settings.ratio.clamp,
        elsewhere_difference=inputs.elsewhere_difference,
        elsewhere_tokens=inputs.elsewhere_tokens,
        clip=settings.surrogate.ratio_clip(advantages),
    )
    surrogate = settings.surrogate.loss(
        SurrogateInputs(
            logprobs=logprobs,
            log_ratio=ratio,
            old_logprobs=old,
            behaviour_logprobs=behaviour,
            advantages=advantages,
            mask=mask,
            turn_index=inputs.turn_index,
            scores=inputs.scores,
        )
    )
    token_loss = surrogate.loss
    if inputs.charges is not None:
        token_loss = token_loss + torch.where(mask, inputs.charges, 0.0) * (logprobs - old).abs()
    tokens = mask.sum()
    parts = {
        "policy/clip_fraction": ((surrogate.clipped & mask).sum(), tokens),
        "policy/ratio": (torch.where(mask, ratio.exp(), 0.0).sum(), tokens),
        "policy/kl_old": (torch.where(mask, kl_estimate(old, logprobs.detach(), "k3"), 0.0).sum(), tokens),
    }

    weights = _weights(settings, inputs, old, behaviour)
    if weights is not None:
        token_loss = token_loss * weights
        parts["policy/correction_weight"] = (torch.where(mask, weights, 0.0).sum(), tokens)

    loss = _aggregate(settings, token_loss, mask, denominators, inputs.lengths)
    part = share(mask, settings.aggregation.mode, denominators, inputs.lengths)
    parts["loss/surrogate"] = (loss, part)

    if settings.needs_reference:
        reference = torch.where(mask, required(inputs.reference_logprobs, "reference_logprobs"), 0.0)
        divergence = kl_estimate(
            logprobs,
            reference,
            settings.kl.estimator,
            straight_through=settings.kl.straight_through,
            log_ratio=_ratio_of_tokens(settings, ratio, logprobs, old)
            if settings.kl.unbiased or settings.kl.gradient_cap is not None
            else None,
            gradient_cap=settings.kl.gradient_cap,
            limit=settings.kl.limit,
        )
        parts["policy/kl_reference"] = (torch.where(mask, divergence, 0.0).sum(), tokens)
        if settings.kl.placement == "loss":
            loss = loss + settings.kl.coefficient * _aggregate(
                settings, divergence, mask, denominators, inputs.lengths
            )

    if settings.positive_nll.coefficient:
        likelihood = _positive_nll(settings, inputs, logprobs, denominators)
        parts["loss/positive_nll"] = (likelihood, part)
        loss = loss + settings.positive_nll.coefficient * likelihood

    if inputs.entropy is not None:
        entropy = torch.where(mask, inputs.entropy, 0.0)
        parts["policy/entropy"] = (entropy.sum(), tokens)
    if settings.needs_entropy:
        bonus = _aggregate(settings, required(inputs.entropy, "entropy"), mask, denominators, inputs.lengths)
        loss = loss - settings.entropy_coefficient * bonus

    parts["loss/policy"] = (loss, part)
    return loss, collect(parts)


def critic_loss(
    settings: AlgorithmSettings,
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    denominators: Denominators,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return a micro-batch's share of the critic's loss, aggregated as the policy's.

    Args:
        settings: The algorithm, which must have a critic.
        values: Values with gradient, `[rows, tokens]`; never read outside the mask, like all that follow.
        old_values: Values that the advantages were computed from.
        returns: `AdvantageResult.returns`.
        mask: True where the policy sampled the token.
        denominators: Counts of everything that the optimizer step trains on, over all shards.
        lengths: See `LossInputs.lengths`.
    """
    if settings.critic is None:
        raise ValueError("the algorithm has no critic")
    values = torch.where(mask, values, 0.0)
    old_values = torch.where(mask, old_values, 0.0)
    returns = torch.where(mask, returns, 0.0)
    critic = settings.critic
    surrogate = value_surrogate(
        values,
        returns,
        old_values=old_values,
        clip=critic.value_clip,
        huber_delta=critic.huber_delta if critic.loss == "huber" else None,
    )
    loss = critic.coefficient * _aggregate(settings, surrogate.loss, mask, denominators, lengths)
    tokens = mask.sum()
    parts = {
        "loss/critic": (loss, share(mask, settings.aggregation.mode, denominators, lengths)),
        "critic/clip_fraction": ((surrogate.clipped & mask).sum(), tokens),
        "critic/value": (values.sum(), tokens),
        "critic/squared_error": ((values - returns).square().sum(), tokens),
    }
    return loss, collect(parts)


def bounded_difference(
    settings: AlgorithmSettings, logprobs: Tensor, start: Tensor, advantages: Tensor
) -> Tensor:
    """Return log ratios of tokens as a ratio of sequences adds them up.

    Args:
        settings: The algorithm.
        logprobs: Log-probabilities of some tokens.
        start: Those that ratios start from.
        advantages: Their advantages.
    """
    clip = settings.surrogate.ratio_clip(advantages)
    return logprobs - start if clip is None else clipped_difference(logprobs - start, clip)


def _proximal(settings: AlgorithmSettings, inputs: LossInputs, logprobs: Tensor, behaviour: Tensor) -> Tensor:
    if settings.proximal == "behaviour":
        return behaviour
    if settings.proximal == "interpolated":
        shares = torch.where(inputs.mask, required(inputs.shares, "shares"), 0.0)
        return interpolated_logprobs(logprobs, behaviour, shares)
    if inputs.old_logprobs is None and settings.updates == 1:
        return logprobs.detach()
    return torch.where(inputs.mask, required(inputs.old_logprobs, "old_logprobs"), 0.0).detach()


def _ratio_of_tokens(settings: AlgorithmSettings, ratio: Tensor, logprobs: Tensor, old: Tensor) -> Tensor:
    """Return the log ratio of each token, which its KL estimate is weighed by, whatever the surrogate reads.

    With the ratio of a sequence in its place the gradient would be that of no divergence.
    """
    if settings.ratio.level == "token":
        return ratio
    return (logprobs - old).clamp(-settings.ratio.clamp, settings.ratio.clamp)


def _weights(
    settings: AlgorithmSettings, inputs: LossInputs, old: Tensor, behaviour: Tensor
) -> Tensor | None:
    """Return the weights of tokens: those that were prepared, or else the correction's of each token or turn."""
    if settings.prepares:
        return torch.where(inputs.mask, required(inputs.weights, "weights"), 1.0)
    correction = settings.correction
    if correction.kind not in ("truncate", "band"):
        return None
    turns = torch.where(inputs.mask, inputs.turn_index, 0)
    rows = torch.arange(len(turns), device=turns.device)[:, None]
    weights = importance_weights(
        old,
        behaviour,
        inputs.mask,
        level=correction.level,
        segment=rows * (turns.max() + 1 if turns.numel() else 1) + turns,
    )
    if correction.kind == "truncate":
        return truncated(weights, correction.cap, correction.floor)
    return banded(weights, correction.low, correction.high)


def _positive_nll(
    settings: AlgorithmSettings, inputs: LossInputs, logprobs: Tensor, denominators: Denominators
) -> Tensor:
    """Return this part's share of the mean over the tokens of the episodes that did well."""
    losses = positive_nll(
        logprobs, required(inputs.scores, "scores"), score_threshold=settings.positive_nll.score_threshold
    )
    return torch.where(inputs.mask, losses, 0.0).sum() / max(denominators.positive_tokens, 1)


def _aggregate(
    settings: AlgorithmSettings,
    values: Tensor,
    mask: Tensor,
    denominators: Denominators,
    lengths: Tensor | None,
) -> Tensor:
    aggregation = settings.aggregation
    return aggregate(values, mask, aggregation.mode, denominators, aggregation.horizon, lengths)
