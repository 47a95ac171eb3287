"""The composition of advantages: which groups and episodes are trained on, and what each of their tokens earned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantage import TokenCredit, TurnCredit, Update
from rollgym.trainer.algorithms.advantages import group_statistics, token_returns, whitened
from rollgym.trainer.algorithms.batch import RowBatch, TokenStream, TrajectoryBatch, required
from rollgym.trainer.algorithms.kl import centred_kl_advantages, kl_estimate
from rollgym.trainer.algorithms.rewards import (
    TurnValues,
    normalised_rewards,
    placed_rewards,
    turn_charges,
    turn_rewards,
)
from rollgym.trainer.algorithms.selection import EpisodeChoice, FilterResult, choose_episodes, filter_groups
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.state import AlgorithmState
from rollgym.trainer.algorithms.turn_credit import returns_of, total_scores


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
    lengths = [sum(tokens) for tokens in batch.tokens]
    returns = returns_of(settings.reward, batch)
    return filter_groups(settings.filter, batch.groups, returns, batch.solved, lengths, batch)


def select_episodes(settings: AlgorithmSettings, batch: TrajectoryBatch) -> EpisodeChoice:
    """Choose the episodes of these groups that are trained on."""
    return choose_episodes(settings.episodes, batch, returns_of(settings.reward, batch))


def compute_advantages(
    settings: AlgorithmSettings,
    batch: TrajectoryBatch,
    rows: RowBatch,
    state: AlgorithmState = AlgorithmState(),  # noqa: B008 - a value that never changes
) -> AdvantageResult:
    """Return the advantage of every sampled token.

    The result does not depend on how trajectories were cut into rows, nor on padding: statistics are those of
    trajectories, turns and sampled tokens.

    Args:
        settings: The algorithm.
        batch: The episodes.
        rows: Their training rows; with values if the algorithm has a critic, and with old and reference
            log-probabilities if its reward has a KL penalty.
        state: What is remembered of earlier steps; of returns, those of this one too.
    """
    shaped = turn_rewards(settings.reward, batch)
    charges = turn_charges(settings.reward, batch)
    scores = torch.tensor(total_scores(shaped, charges), dtype=torch.float64)
    rewards = normalised_rewards(settings.reward, shaped, state.returns)
    stream = TokenStream.from_rows(rows, len(batch))
    _check_turns(stream, rewards)
    penalty = _reward_kl(settings, rows)
    returns = None
    if settings.advantage.per_token:
        placed = placed_rewards(rewards, stream, rows.mask)
        if penalty is not None:
            placed = placed - penalty
        credit = TokenCredit(batch, rows, stream, placed, settings.reward)
        advantages, returns = settings.advantage.of_tokens(credit)
    else:
        if penalty is not None:
            rewards = _penalised(rewards, stream, penalty)
        turns = settings.advantage.of_turns(TurnCredit(batch, rewards, charges, state, settings.reward))
        advantages = _spread(turns, stream, rows.mask)
    if settings.kl.coefficient and settings.kl.placement == "return":
        advantages = advantages - _penalty_to_come(settings, stream, rows)
    if settings.advantage.whiten:
        advantages = whitened(
            advantages,
            rows.mask,
            unbiased=settings.advantage.whiten_unbiased,
            epsilon=settings.advantage.whiten_epsilon,
            form=settings.advantage.whiten_form,
        )
    if settings.kl.coefficient and settings.kl.placement == "advantage":
        old, reference = _of_policies(rows)
        advantages = advantages + centred_kl_advantages(old, reference, rows.mask, settings.kl.coefficient)
    if settings.advantage.clip is not None:
        advantages = advantages.clamp(-settings.advantage.clip, settings.advantage.clip)
    return AdvantageResult(
        advantages=advantages.float(),
        returns=None if returns is None else returns.float(),
        scores=scores.to(rows.mask.device)[rows.trajectory].float(),
        metrics=_batch_metrics(batch, scores, advantages[rows.mask]),
    )


def with_returns(
    settings: AlgorithmSettings, state: AlgorithmState, batch: TrajectoryBatch
) -> AlgorithmState:
    """Return the state with the returns of these episodes taken in, where anything reads their moments."""
    if settings.reward.normalise != "running":
        return state
    return replace(state, returns=state.returns.taking(returns_of(settings.reward, batch)))


def after_update(
    settings: AlgorithmSettings, state: AlgorithmState, batch: TrajectoryBatch, moved: float
) -> AlgorithmState:
    """Return the state after an update on these episodes.

    Args:
        settings: The algorithm.
        state: Before.
        batch: The episodes.
        moved: How far the update has moved the policy, in nats per token.
    """
    return settings.advantage.remembered(state, Update(batch, moved, settings.reward))


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
    """Return, for each sampled token, the index of its turn among all turns of the batch."""
    lengths = torch.tensor([len(part) for part in turns], dtype=torch.int64, device=stream.turn.device)
    return (lengths.cumsum(0) - lengths)[stream.trajectory] + stream.turn


def _reward_kl(settings: AlgorithmSettings, rows: RowBatch) -> Tensor | None:
    if not settings.kl.coefficient or settings.kl.placement != "reward":
        return None
    return _token_penalty(settings, rows)


def _penalty_to_come(settings: AlgorithmSettings, stream: TokenStream, rows: RowBatch) -> Tensor:
    """Return the penalty of each token and of those sampled after it in its episode, zero outside the mask."""
    penalty = stream.gather(_token_penalty(settings, rows))
    return stream.scatter(token_returns(penalty, stream.sampled()), rows.mask)


def _token_penalty(settings: AlgorithmSettings, rows: RowBatch) -> Tensor:
    old, reference = _of_policies(rows)
    estimate = kl_estimate(old, reference, settings.kl.estimator, limit=settings.kl.limit)
    return settings.kl.coefficient * estimate


def _of_policies(rows: RowBatch) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities at the start of the update and under the reference, zero outside the mask."""
    old = torch.where(rows.mask, required(rows.old_logprobs, "old_logprobs"), 0.0)
    reference = torch.where(rows.mask, required(rows.reference_logprobs, "reference_logprobs"), 0.0)
    return old.double(), reference.double()


def _penalised(rewards: TurnValues, stream: TokenStream, penalty: Tensor) -> TurnValues:
    costs = penalty.new_zeros(sum(len(turns) for turns in rewards))
    costs = costs.index_add(0, _flat_turns(rewards, stream), penalty[stream.row, stream.column])
    left = iter(costs.tolist())
    return [[reward - next(left) for reward in turns] for turns in rewards]


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
