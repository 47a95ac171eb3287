"""The composition of advantages: which groups and episodes are trained on, and what each of their tokens earned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantage_settings import (
    GaeAdvantage,
    MovingBaselineAdvantage,
    OptimalTokenAdvantage,
    SpoAdvantage,
    TokenReturnAdvantage,
)
from rollgym.trainer.algorithms.advantages import (
    bi_level_advantages,
    generalized_advantages,
    group_statistics,
    length_adaptive_lambda,
    whitened,
)
from rollgym.trainer.algorithms.batch import RowBatch, TrajectoryBatch, required
from rollgym.trainer.algorithms.episodes import EpisodeChoice, choose_episodes
from rollgym.trainer.algorithms.filters import FilterResult, filter_groups
from rollgym.trainer.algorithms.kl import centred_kl_advantages, kl_estimate
from rollgym.trainer.algorithms.returns import token_returns
from rollgym.trainer.algorithms.rewards import (
    TurnValues,
    normalised_rewards,
    placed_rewards,
    turn_charges,
    turn_rewards,
)
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.state import AlgorithmState, with_averages, with_outcomes
from rollgym.trainer.algorithms.stream import TokenStream
from rollgym.trainer.algorithms.token_baseline import optimal_token_baseline_advantages
from rollgym.trainer.algorithms.turn_credit import (
    greedy_scores,
    returns_of,
    total_scores,
    tracked_keys,
    turn_advantages,
)


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
    returns = returns_of(settings, batch)
    return filter_groups(settings.filter, batch.groups, returns, batch.solved, lengths, batch)


def select_episodes(settings: AlgorithmSettings, batch: TrajectoryBatch) -> EpisodeChoice:
    """Choose the episodes of these groups that are trained on."""
    return choose_episodes(settings.episodes, batch, returns_of(settings, batch))


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
        rows: Their training rows; with values where the algorithm has a critic, and with old and reference
            log-probabilities where it has a KL penalty in the reward.
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
    if settings.estimates_values or isinstance(
        settings.advantage, TokenReturnAdvantage | OptimalTokenAdvantage
    ):
        placed = placed_rewards(rewards, stream, rows.mask)
        if penalty is not None:
            placed = placed - penalty
        advantages, returns = _token_advantages(settings, batch, stream, rows, placed)
    else:
        if penalty is not None:
            rewards = _penalised(rewards, stream, penalty)
        turns = turn_advantages(settings, batch, rewards, charges, state)
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
    return replace(state, returns=state.returns.taking(returns_of(settings, batch)))


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
    advantage = settings.advantage
    if isinstance(advantage, MovingBaselineAdvantage):
        returns = total_scores(
            normalised_rewards(settings.reward, turn_rewards(settings.reward, batch), state.returns),
            turn_charges(settings.reward, batch),
        )
        return with_averages(advantage, state, tracked_keys(advantage, batch), returns)
    if not isinstance(advantage, SpoAdvantage):
        return state
    state = replace(state, moved=state.moved + moved)
    keys = tracked_keys(advantage, batch)
    return with_outcomes(advantage, state, keys, returns_of(settings, batch))


def _token_advantages(
    settings: AlgorithmSettings,
    batch: TrajectoryBatch,
    stream: TokenStream,
    rows: RowBatch,
    rewards: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Return an advantage for each token, and what a critic should say, where there is one."""
    sampled = stream.flags(torch.ones_like(stream.turn_end))
    advantage = settings.advantage
    match advantage.kind:
        case "token_return":
            dense = stream.gather(rewards)
            if advantage.return_mask == "none":
                advantages = token_returns(rewards, rows.mask, discount=advantage.gamma, return_mask="none")
            else:
                advantages = stream.scatter(
                    token_returns(dense, sampled, discount=advantage.gamma), rows.mask
                )
            if advantage.baseline != "none":
                worth = _baseline(settings, advantage, batch, dense)[rows.trajectory]
                advantages = torch.where(rows.mask, advantages - worth[:, None], 0.0)
            return advantages, None
        case "optimal_token":
            advantages, _ = optimal_token_baseline_advantages(
                stream.gather(rewards),
                sampled,
                torch.tensor(batch.groups, dtype=torch.int64),
                stream.gather(required(rows.old_logprobs, "old_logprobs")),
                stream.gather(required(rows.squared_probabilities, "squared_probabilities")),
                zero_tail=advantage.zero_tail,
                epsilon=advantage.epsilon,
            )
            return stream.scatter(advantages, rows.mask), None
        case "gae" if advantage.gae_mask == "none":
            values = torch.where(rows.mask, required(rows.values, "values").double(), 0.0)
            return _generalized(advantage, rewards, values, rows.mask)
        case "gae":
            values = stream.gather(required(rows.values, "values"))
            last = required(rows.last_values, "last_values") if advantage.bootstrap_truncated else None
            advantages, returns = _generalized(advantage, stream.gather(rewards), values, sampled, last)
        case "bi_level_gae":
            advantages, returns = bi_level_advantages(
                stream.gather(rewards),
                stream.gather(required(rows.values, "values")),
                sampled,
                stream.flags(stream.turn_end),
                turn_discount=advantage.turn_discount,
                gamma=advantage.gamma,
                gae_lambda=advantage.gae_lambda,
            )
        case _:
            raise ValueError(f"advantage '{advantage.kind}' reads no critic")
    return stream.scatter(advantages, rows.mask), stream.scatter(returns, rows.mask)


def _baseline(
    settings: AlgorithmSettings, advantage: TokenReturnAdvantage, batch: TrajectoryBatch, rewards: Tensor
) -> Tensor:
    """Return what is taken off the returns of each trajectory's tokens, `[trajectories]`."""
    if advantage.baseline == "greedy":
        return greedy_scores(settings, batch).to(rewards.device)
    groups = torch.tensor(batch.groups, dtype=torch.int64, device=rewards.device)
    return group_statistics(rewards.sum(dim=1), groups).mean


def _generalized(
    advantage: GaeAdvantage, rewards: Tensor, values: Tensor, mask: Tensor, last_values: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return GAE, and what the critic should say: by a lambda of its own, where it has one.

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
    sampled = stream.flags(torch.ones_like(stream.turn_end))
    return stream.scatter(token_returns(stream.gather(_token_penalty(settings, rows)), sampled), rows.mask)


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
