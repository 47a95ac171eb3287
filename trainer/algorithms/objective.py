"""The composition: advantages of a batch, and the losses of a micro-batch, as the settings name their parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from trainer.algorithms.advantages import (
    bi_level_advantages,
    generalized_advantages,
    group_advantages,
    group_statistics,
    whitened,
)
from trainer.algorithms.aggregation import Denominators, aggregate, share
from trainer.algorithms.batch import LossInputs, RowBatch, TrajectoryBatch
from trainer.algorithms.corrections import banded, importance_weights, truncated
from trainer.algorithms.filters import FilterResult, filter_groups
from trainer.algorithms.gigpo import anchor_groups, gigpo_advantages
from trainer.algorithms.kl import kl_estimate
from trainer.algorithms.losses import (
    SurrogateLoss,
    ppo_surrogate,
    reinforce_surrogate,
    value_surrogate,
    weighted_surrogate,
)
from trainer.algorithms.metrics import Metrics, collect
from trainer.algorithms.ratio import log_ratio
from trainer.algorithms.rewards import (
    TurnValues,
    discounted_return,
    discounted_turn_returns,
    placed_rewards,
    turn_charges,
    turn_rewards,
)
from trainer.algorithms.settings import AlgorithmSettings
from trainer.algorithms.stream import TokenStream
from trainer.core.numbers import finite_number
from trainer.core.plugins import Plugin, load_plugin


@dataclass(frozen=True, slots=True)
class AdvantageResult:
    """Advantages of a whole batch, computed once, before any split.

    Attributes:
        advantages: Float32 `[rows, tokens]`; zero outside the mask.
        returns: What the critic should say, float32 `[rows, tokens]`, zero outside the mask; None without a critic.
        scores: Return of each row's trajectory, float32 `[rows]`.
        metrics: Numbers of the batch.
    """

    advantages: Tensor
    returns: Tensor | None
    scores: Tensor
    metrics: dict[str, float]


def select_groups(settings: AlgorithmSettings, batch: TrajectoryBatch) -> FilterResult:
    """Choose the groups that are trained on, before advantages are computed."""
    returns = _scores(turn_rewards(settings.reward, batch), turn_charges(settings.reward, batch))
    return filter_groups(settings.filter, batch.groups, returns, batch.solved)


def compute_advantages(
    settings: AlgorithmSettings, batch: TrajectoryBatch, rows: RowBatch
) -> AdvantageResult:
    """Return the advantage of every sampled token.

    The result does not depend on how trajectories were cut into rows, nor on padding: statistics are those of
    trajectories, turns and sampled tokens.

    Args:
        settings: The algorithm.
        batch: The episodes.
        rows: Their training rows; with values where the algorithm has a critic, and with old and reference
            log-probabilities where it has a KL penalty in the reward.
    """
    rewards = turn_rewards(settings.reward, batch)
    charges = turn_charges(settings.reward, batch)
    scores = torch.tensor(_scores(rewards, charges), dtype=torch.float64)
    stream = TokenStream.from_rows(rows, len(batch))
    _check_turns(stream, rewards)
    penalty = _reward_kl(settings, rows)
    returns = None
    if settings.estimates_values or settings.advantage.kind == "token_return":
        placed = placed_rewards(rewards, stream, rows.mask)
        if penalty is not None:
            placed = placed - penalty
        advantages, returns = _token_advantages(settings, stream, rows, placed)
    else:
        if penalty is not None:
            rewards = _penalised(rewards, stream, penalty)
        advantages = _spread(_turn_advantages(settings, batch, rewards, charges), stream, rows.mask)
    if settings.advantage.whiten:
        advantages = whitened(advantages, rows.mask)
    if settings.advantage.clip is not None:
        advantages = advantages.clamp(-settings.advantage.clip, settings.advantage.clip)
    return AdvantageResult(
        advantages=advantages.float(),
        returns=None if returns is None else returns.float(),
        scores=scores.to(rows.mask.device)[rows.trajectory].float(),
        metrics=_batch_metrics(batch, scores, advantages[rows.mask]),
    )


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
    ratio = log_ratio(
        logprobs,
        old,
        mask,
        inputs.turn_index,
        level=settings.ratio.level,
        clamp=settings.ratio.clamp,
        elsewhere_difference=inputs.elsewhere_difference,
        elsewhere_tokens=inputs.elsewhere_tokens,
    )
    surrogate = _surrogate(settings, inputs, logprobs, ratio)
    token_loss = surrogate.loss
    tokens = mask.sum()
    parts = {
        "policy/clip_fraction": ((surrogate.clipped & mask).sum(), tokens),
        "policy/ratio": (torch.where(mask, ratio.exp(), 0.0).sum(), tokens),
        "policy/kl_old": (torch.where(mask, kl_estimate(old, logprobs.detach(), "k3"), 0.0).sum(), tokens),
    }

    weights = _correction(settings, old, behaviour, mask)
    if weights is not None:
        token_loss = token_loss * weights
        parts["policy/correction_weight"] = (torch.where(mask, weights, 0.0).sum(), tokens)

    loss = _aggregate(settings, token_loss, mask, denominators, inputs.lengths)
    part = share(mask, settings.aggregation.mode, denominators, inputs.lengths)
    parts["loss/surrogate"] = (loss, part)

    if settings.needs_reference:
        reference = torch.where(mask, _required(inputs.reference_logprobs, "reference_logprobs"), 0.0)
        divergence = kl_estimate(
            logprobs, reference, settings.kl.estimator, straight_through=settings.kl.straight_through
        )
        parts["policy/kl_reference"] = (torch.where(mask, divergence, 0.0).sum(), tokens)
        if settings.kl.placement == "loss":
            loss = loss + settings.kl.coefficient * _aggregate(
                settings, divergence, mask, denominators, inputs.lengths
            )

    if inputs.entropy is not None:
        entropy = torch.where(mask, inputs.entropy, 0.0)
        parts["policy/entropy"] = (entropy.sum(), tokens)
    if settings.needs_entropy:
        bonus = _aggregate(settings, _required(inputs.entropy, "entropy"), mask, denominators, inputs.lengths)
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
    surrogate = value_surrogate(values, returns, old_values=old_values, clip=settings.critic.value_clip)
    loss = settings.critic.coefficient * _aggregate(settings, surrogate.loss, mask, denominators, lengths)
    tokens = mask.sum()
    parts = {
        "loss/critic": (loss, share(mask, settings.aggregation.mode, denominators, lengths)),
        "critic/clip_fraction": ((surrogate.clipped & mask).sum(), tokens),
        "critic/value": (values.sum(), tokens),
        "critic/squared_error": ((values - returns).square().sum(), tokens),
    }
    return loss, collect(parts)


def _scores(rewards: TurnValues, charges: TurnValues | None) -> list[float]:
    """Return what each trajectory scored in all."""
    scores = [sum(turns) for turns in rewards]
    if charges is None:
        return scores
    return [score + sum(turns) for score, turns in zip(scores, charges, strict=True)]


def _turn_advantages(
    settings: AlgorithmSettings, batch: TrajectoryBatch, rewards: TurnValues, charges: TurnValues | None
) -> TurnValues:
    advantage = settings.advantage
    groups = torch.tensor(batch.groups, dtype=torch.int64)
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    match advantage.kind:
        case "group":
            returns = [[discounted_return(turns, advantage.turn_discount)] for turns in rewards]
            episode = group_advantages(
                torch.tensor(_scores(returns, charges), dtype=torch.float64),
                groups,
                baseline=advantage.baseline,
                scale=advantage.scale,
                singleton=advantage.singleton,
                epsilon=advantage.epsilon,
                counts=lengths if advantage.unit == "step" else None,
            ).tolist()
            return [[value] * len(turns) for value, turns in zip(episode, rewards, strict=True)]
        case "turn":
            steps = [discounted_turn_returns(turns, advantage.turn_discount) for turns in rewards]
            if charges is not None:
                steps = [
                    [value + charge for value, charge in zip(*pair, strict=True)]
                    for pair in zip(steps, charges, strict=True)
                ]
            flat = group_advantages(
                torch.tensor([value for turns in steps for value in turns], dtype=torch.float64),
                groups.repeat_interleave(lengths),
                baseline=advantage.baseline,
                scale=advantage.scale,
                singleton=advantage.singleton,
                epsilon=advantage.epsilon,
            )
            values = iter(flat.tolist())
            return [[next(values) for _ in turns] for turns in rewards]
        case "gigpo":
            return gigpo_advantages(
                rewards,
                batch.groups,
                anchor_groups(batch.anchors, batch.groups, advantage.similarity),
                charges=charges,
                normalise_std=advantage.normalisation == "mean_std_norm",
                step_weight=advantage.step_weight,
                turn_discount=advantage.turn_discount,
                count_steps=advantage.unit == "step",
                singleton_raw=advantage.singleton == "raw",
                epsilon=advantage.epsilon,
            )
        case "custom":
            plugin = load_plugin(advantage.function, "algorithm.advantage.function")
            return _custom_advantages(plugin, replace(batch, rewards=rewards))
        case "gae" | "bi_level_gae" | "token_return":
            raise ValueError(f"advantage '{advantage.kind}' is computed per token")
        case _:
            assert_never(advantage)


def _custom_advantages(plugin: Plugin, batch: TrajectoryBatch) -> TurnValues:
    """Return what a function of the user's makes of a batch.

    Raises:
        PluginError: If it raises, or does not return an advantage for each turn.
        InvalidNumberError: If one of them is no number to compute with.
    """
    expected = "one advantage per turn of each trajectory"
    found = [plugin.elements(part, expected) for part in plugin.elements(plugin(batch), expected)]
    if [len(part) for part in found] != [len(part) for part in batch.rewards]:
        raise plugin.broken(f"must return {expected}")
    return [[finite_number(value, f"an advantage of {plugin.path}") for value in part] for part in found]


def _token_advantages(
    settings: AlgorithmSettings, stream: TokenStream, rows: RowBatch, rewards: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return an advantage for each token, and what a critic should say, where there is one."""
    sampled = stream.flags(torch.ones_like(stream.turn_end))
    advantage = settings.advantage
    if advantage.kind == "token_return":
        dense = stream.gather(rewards)
        # GAE of a critic that says 0, with an error trace that never decays: the discounted return.
        advantages, _ = generalized_advantages(
            dense, torch.zeros_like(dense), sampled, discount=advantage.token_discount, trace=1.0
        )
        return stream.scatter(advantages, rows.mask), None
    values = stream.gather(_required(rows.values, "values"))
    match advantage.kind:
        case "gae":
            advantages, returns = generalized_advantages(
                stream.gather(rewards),
                values,
                sampled,
                discount=advantage.token_discount,
                trace=advantage.trace,
            )
        case "bi_level_gae":
            advantages, returns = bi_level_advantages(
                stream.gather(rewards),
                values,
                sampled,
                stream.flags(stream.turn_end),
                turn_discount=advantage.turn_discount,
                token_discount=advantage.token_discount,
                trace=advantage.trace,
            )
        case _:
            raise ValueError(f"advantage '{advantage.kind}' reads no critic")
    return stream.scatter(advantages, rows.mask), stream.scatter(returns, rows.mask)


def _check_turns(stream: TokenStream, rewards: TurnValues) -> None:
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64, device=stream.turn.device)
    if bool(((stream.turn < 0) | (stream.turn >= lengths[stream.trajectory])).any()):
        raise ValueError("a sampled token belongs to a turn that its trajectory does not have")


def _spread(turns: Sequence[Sequence[float]], stream: TokenStream, mask: Tensor) -> Tensor:
    flat = torch.tensor([value for part in turns for value in part], dtype=torch.float64, device=mask.device)
    spread = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    spread[stream.row, stream.column] = flat[_flat_turns(turns, stream)]
    return spread


def _flat_turns(turns: Sequence[Sequence[float]], stream: TokenStream) -> Tensor:
    """Return, for each sampled token, the place of its turn among all turns of the batch."""
    lengths = torch.tensor([len(part) for part in turns], dtype=torch.int64, device=stream.turn.device)
    return (lengths.cumsum(0) - lengths)[stream.trajectory] + stream.turn


def _reward_kl(settings: AlgorithmSettings, rows: RowBatch) -> Tensor | None:
    if not settings.kl.coefficient or settings.kl.placement != "reward":
        return None
    old = torch.where(rows.mask, _required(rows.old_logprobs, "old_logprobs"), 0.0)
    reference = torch.where(rows.mask, _required(rows.reference_logprobs, "reference_logprobs"), 0.0)
    return settings.kl.coefficient * kl_estimate(old.double(), reference.double(), settings.kl.estimator)


def _penalised(rewards: TurnValues, stream: TokenStream, penalty: Tensor) -> TurnValues:
    costs = penalty.new_zeros(sum(len(turns) for turns in rewards))
    costs = costs.index_add(0, _flat_turns(rewards, stream), penalty[stream.row, stream.column])
    left = iter(costs.tolist())
    return [[reward - next(left) for reward in turns] for turns in rewards]


def _proximal(settings: AlgorithmSettings, inputs: LossInputs, logprobs: Tensor, behaviour: Tensor) -> Tensor:
    if settings.proximal == "behaviour":
        return behaviour
    if inputs.old_logprobs is None and settings.updates == 1:
        return logprobs.detach()
    return torch.where(inputs.mask, _required(inputs.old_logprobs, "old_logprobs"), 0.0).detach()


def _surrogate(
    settings: AlgorithmSettings, inputs: LossInputs, logprobs: Tensor, ratio: Tensor
) -> SurrogateLoss:
    advantages = torch.where(inputs.mask, inputs.advantages, 0.0)
    surrogate = settings.surrogate
    match surrogate.kind:
        case "ppo":
            return ppo_surrogate(
                ratio,
                advantages,
                clip_low=surrogate.clip_low,
                clip_high=surrogate.clip_high,
                dual_clip=surrogate.dual_clip,
            )
        case "reinforce":
            return reinforce_surrogate(logprobs, advantages)
        case "weighted":
            applies = None
            if surrogate.applies_to == "negative_scores":
                scores = _required(inputs.scores, "scores")
                applies = (scores <= surrogate.score_threshold)[:, None]
            return weighted_surrogate(
                logprobs,
                ratio,
                advantages,
                weight_low=surrogate.weight_low,
                weight_high=surrogate.weight_high,
                applies=applies,
            )
        case _:
            assert_never(surrogate)


def _correction(settings: AlgorithmSettings, old: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor | None:
    correction = settings.correction
    match correction.kind:
        case "off":
            return None
        case "truncate":
            return truncated(importance_weights(old, behaviour, mask), correction.cap)
        case "band":
            return banded(importance_weights(old, behaviour, mask), correction.low, correction.high)
        case _:
            assert_never(correction)


def _aggregate(
    settings: AlgorithmSettings,
    values: Tensor,
    mask: Tensor,
    denominators: Denominators,
    lengths: Tensor | None,
) -> Tensor:
    aggregation = settings.aggregation
    return aggregate(values, mask, aggregation.mode, denominators, aggregation.horizon, lengths)


def _required(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"the algorithm reads '{name}', which is missing")
    return tensor


def _batch_metrics(batch: TrajectoryBatch, scores: Tensor, advantages: Tensor) -> dict[str, float]:
    statistics = group_statistics(scores, torch.tensor(batch.groups, dtype=torch.int64))
    metrics = {}
    if len(scores):
        metrics["batch/return"] = scores.mean().item()
        metrics["batch/return_std_in_group"] = statistics.std.mean().item()
    if advantages.numel():
        metrics["batch/advantage_mean"] = advantages.mean().item()
        metrics["batch/advantage_max"] = advantages.abs().max().item()
    return metrics
