"""Weights of the tokens of an optimizer step, computed from all its rows before they are split.

A quantity of all tokens of a step (a quantile, a mean weight, the tokens that moved most) would depend on the cut into
micro-batches and ranks if a loss computed it. So it is computed here, once, and the weights travel with the rows.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.batch import StepTokens, TokenStream
from rollgym.trainer.algorithms.corrections import (
    banded,
    importance_weights,
    normalised,
    rejection_mask,
    truncated,
)
from rollgym.trainer.algorithms.losses import ppo_surrogate
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.surrogates import PpoSurrogate
from rollgym.trainer.algorithms.token_settings import ClipCovSelection, CustomSelection, Rejection
from rollgym.trainer.algorithms.user_functions import left_alone
from rollgym.trainer.core.errors import InvalidNumberError
from rollgym.trainer.core.plugins import load_plugin


@dataclass(frozen=True, slots=True)
class StepWeights:
    """What `prepare_step` makes of a step.

    Attributes:
        weights: What each token's loss is multiplied by, float32 `[rows, tokens]`; 1 outside the mask.
        charges: What each token pays for every nat that it moved from `old`; None without such a charge.
        metrics: Parts of the step's tokens that are kept.
    """

    weights: Tensor
    charges: Tensor | None
    metrics: dict[str, float]


def prepare_step(settings: AlgorithmSettings, tokens: StepTokens, seed: int = 0) -> StepWeights:
    """Return the weights of all tokens of one optimizer step.

    A pure function of its arguments. The result does not depend on the order of rows, on padding, or on how episodes
    were cut into rows.

    Args:
        settings: The algorithm.
        tokens: All rows of the step.
        seed: Seed of the selections that draw tokens at random.

    Raises:
        PluginError: If a selection of the user's fails.
        InvalidNumberError: If it returns what cannot be computed with.
    """
    mask = tokens.mask
    weights = torch.ones(mask.shape)
    metrics: dict[str, float] = {}
    if settings.correction.kind != "off":
        weights = _correction(settings, tokens)
        metrics["correction/kept"] = _part(weights != 0, mask)
    charges = None
    selection = settings.selection
    if selection.kind == "kl_cov":
        chosen = _scattered(tokens, kl_cov_mask(_covariances(tokens), fraction=selection.fraction))
        charges = selection.coefficient * chosen.float()
        metrics["selection/charged"] = _part(chosen, mask)
    elif isinstance(selection, CustomSelection):
        weights = weights * _custom(selection, tokens)
    elif selection.kind != "none":
        kept = _scattered(tokens, _kept(settings, tokens, seed))
        weights = torch.where(kept, weights, 0.0)
        metrics["selection/kept"] = _part(kept, mask)
    return StepWeights(torch.where(mask, weights, 1.0), charges, metrics)


def _correction(settings: AlgorithmSettings, tokens: StepTokens) -> Tensor:
    correction = settings.correction
    if correction.kind == "off":
        raise ValueError("there is no correction")
    weights = torch.ones(tokens.mask.shape)
    if correction.kind != "reject":
        segment = _segment(tokens, "turn" if correction.level == "turn" else "sequence")
        weights = importance_weights(
            tokens.old_logprobs,
            tokens.behaviour_logprobs,
            tokens.mask,
            level=correction.level,
            segment=segment,
        )
        if correction.kind == "truncate":
            weights = truncated(weights, correction.cap, correction.floor)
        else:
            weights = banded(weights, correction.low, correction.high)
        if correction.normalise:
            of_sequences = segment if correction.level == "sequence" else None
            weights = normalised(weights, tokens.mask, of_sequences)
    for rejection in correction.reject:
        weights = torch.where(_passes(rejection, tokens), weights, 0.0)
    return weights


def _passes(rejection: Rejection, tokens: StepTokens) -> Tensor:
    current = rejection.policy == "current"
    return rejection_mask(
        tokens.current_logprobs if current else tokens.old_logprobs,
        tokens.behaviour_logprobs,
        tokens.mask,
        measure=rejection.measure,
        statistic=rejection.statistic,
        low=rejection.low,
        high=rejection.high,
        segment=None if rejection.level == "token" else _segment(tokens, rejection.level),
        advantages=tokens.advantages if rejection.only_negative else None,
    )


def _segment(tokens: StepTokens, level: str) -> Tensor:
    """Return the turn or the episode of each token as a number."""
    episode = tokens.trajectory[:, None].expand(tokens.mask.shape)
    if level == "sequence":
        return episode
    turns = torch.where(tokens.mask, tokens.turn_index, 0)
    return episode * (int(turns.max()) + 1 if turns.numel() else 1) + turns


def _kept(settings: AlgorithmSettings, tokens: StepTokens, seed: int) -> Tensor:
    """Return which tokens a selection keeps, in the order of the stream."""
    selection = settings.selection
    match selection.kind:
        case "second_moment":
            at = tokens.current_logprobs if selection.policy == "current" else tokens.old_logprobs
            return second_moment_mask(_gathered(tokens, at - tokens.behaviour_logprobs), selection.threshold)
        case "clip_cov":
            return _clip_cov(settings, selection, tokens, seed)
        case "high_entropy":
            if tokens.entropy is None:
                raise ValueError("the algorithm reads 'entropy', which is missing")
            return high_entropy_mask(_gathered(tokens, tokens.entropy), fraction=selection.fraction)
        case "none" | "kl_cov" | "custom":
            raise ValueError(f"selection '{selection.kind}' keeps all")
        case _:
            assert_never(selection)


def _clip_cov(
    settings: AlgorithmSettings, selection: ClipCovSelection, tokens: StepTokens, seed: int
) -> Tensor:
    covariance = _covariances(tokens)
    free = torch.ones_like(covariance, dtype=torch.bool)
    if isinstance(settings.surrogate, PpoSurrogate):
        start = tokens.behaviour_logprobs if settings.proximal == "behaviour" else tokens.old_logprobs
        free = ~ppo_surrogate(
            _gathered(tokens, tokens.current_logprobs - start),
            _gathered(tokens, tokens.advantages),
            clip_low=settings.surrogate.clip_low,
            clip_high=settings.surrogate.clip_high,
        ).clipped
    return clip_cov_mask(
        covariance,
        free,
        fraction=selection.fraction,
        low=selection.low,
        high=selection.high,
        generator=torch.Generator().manual_seed(seed),
    )


def _covariances(tokens: StepTokens) -> Tensor:
    return covariances(_gathered(tokens, tokens.current_logprobs), _gathered(tokens, tokens.advantages))


def _custom(selection: CustomSelection, tokens: StepTokens) -> Tensor:
    plugin = load_plugin(selection.function, "algorithm.selection.function")
    with left_alone(plugin, tokens):
        given = plugin(tokens)
    if not isinstance(given, Tensor) or given.shape != tokens.mask.shape:
        raise plugin.broken("must return a tensor with a weight for each token, [rows, tokens]")
    weights = torch.where(tokens.mask, given.detach().float(), 1.0)
    if not bool(weights.isfinite().all()):
        raise InvalidNumberError(f"a weight of {plugin.path} is not finite")
    return weights


def _stream(tokens: StepTokens) -> TokenStream:
    episodes, episode = torch.unique(tokens.trajectory, return_inverse=True)
    return TokenStream.ordered(episode, tokens.mask, tokens.turn_index, len(episodes))


def _gathered(tokens: StepTokens, values: Tensor) -> Tensor:
    """Return numbers of the sampled tokens in the order of the stream."""
    stream = _stream(tokens)
    return values[stream.row, stream.column]


def _scattered(tokens: StepTokens, flags: Tensor) -> Tensor:
    stream = _stream(tokens)
    spread = torch.zeros_like(tokens.mask)
    spread[stream.row, stream.column] = flags
    return spread


def _part(chosen: Tensor, mask: Tensor) -> float:
    return float((chosen & mask).sum()) / max(int(mask.sum()), 1)


# Which tokens of an optimizer step are trained on. These functions read all of its sampled tokens at once, `[tokens]`
# each, in an order that does not depend on how episodes lie in rows (see `TokenStream`): ties are broken by
# position in it.


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
    position = (1 - fraction) * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    threshold = torch.lerp(ordered[below], ordered[above], position - below)
    return entropy >= threshold
