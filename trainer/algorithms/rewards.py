"""Transformations of the environment's rewards, and the token that each is assigned to."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollgym.trainer.algorithms.batch import TokenStream, TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.state import RunningMoments

TurnValues = list[list[float]]
_EPSILON = 1e-6


def turn_rewards(settings: RewardSettings, batch: TrajectoryBatch) -> TurnValues:
    """Return the reward of each turn: penalty for unreadable replies, clip, overlong episodes, scale, offset.

    With `penalty_in: return` the penalties for unreadable replies are left out: see `turn_charges`.
    """
    composed = []
    cut_off = batch.truncated or [False] * len(batch)
    for rewards, penalties, charges, tokens, cut in zip(
        batch.rewards, batch.format_penalties, _penalties(settings, batch), batch.tokens, cut_off, strict=True
    ):
        turns = list(rewards)
        if settings.penalty_in == "return":
            turns = [reward - theirs for reward, theirs in zip(turns, penalties, strict=True)]
        elif settings.invalid_action_penalty is not None:
            turns = [
                reward - theirs + ours for reward, theirs, ours in zip(turns, penalties, charges, strict=True)
            ]
        turns = [clipped(reward, settings.turn_low, settings.turn_high) for reward in turns]
        if (overlong := settings.overlong) is not None and turns:
            turns[-1] += overlong.penalty * overlong_penalty(
                sum(tokens), overlong.max_tokens, overlong.buffer_tokens
            )
        scale = settings.scale * (settings.truncated_scale if cut else 1.0)
        turns = [scale * reward for reward in turns]
        if turns and settings.offset:
            turns[-1] += settings.offset
        if cut and turns and settings.truncated_reward is not None:
            turns = [0.0] * (len(turns) - 1) + [settings.truncated_reward]
        composed.append(turns)
    return composed


def normalised_rewards(settings: RewardSettings, rewards: TurnValues, so_far: RunningMoments) -> TurnValues:
    """Return rewards divided by the deviation of returns; with `normalise_mean` the last turn's less the scaled mean.

    If the deviation is 0, rewards are not divided.

    Args:
        settings: Whether these are the moments of this batch or of all episodes so far.
        rewards: Reward of each turn.
        so_far: Moments of the returns of all episodes so far, those of this batch included.
    """
    if settings.normalise == "none":
        return rewards
    moments = so_far
    if settings.normalise == "batch":
        moments = RunningMoments().taking([sum(turns) for turns in rewards])
    factor = 1 / (moments.deviation + _EPSILON) if moments.deviation > _EPSILON else 1.0
    scaled = [[factor * reward for reward in turns] for turns in rewards]
    if settings.normalise_mean:
        for turns in scaled:
            if turns:
                turns[-1] -= factor * moments.mean
    return scaled


def turn_charges(settings: RewardSettings, batch: TrajectoryBatch) -> TurnValues | None:
    """Return what is added to each turn's own return after discounting (zero or negative); None if nothing is.

    verl-agent takes the penalty of an unreadable reply off that step's score after its returns are discounted, so
    that the turns before it do not pay for it. What was cut off pays the share that it earns of its rewards, and
    nothing beside `truncated_reward`.
    """
    if settings.penalty_in == "reward":
        return None
    share = settings.truncated_scale if settings.truncated_reward is None else 0.0
    return [
        [settings.scale * (share if cut else 1.0) * charge for charge in turns]
        for turns, cut in zip(
            _penalties(settings, batch), batch.truncated or [False] * len(batch), strict=True
        )
    ]


def _penalties(settings: RewardSettings, batch: TrajectoryBatch) -> TurnValues:
    """Return the penalty for each turn's reply, zero or negative: the settings', or else the environment's own."""
    ours = settings.invalid_action_penalty
    if ours is None:
        return [list(turns) for turns in batch.format_penalties]
    return [[0.0 if readable else -ours for readable in turns] for turns in batch.valid]


def clipped(reward: float, low: float | None, high: float | None) -> float:
    """Return a reward within bounds, either of which may be absent."""
    if low is not None:
        reward = max(reward, low)
    if high is not None:
        reward = min(reward, high)
    return reward


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Return DAPO's soft length penalty: 0 up to `max_length - buffer`, falling to -1 at `max_length`, -1 beyond."""
    return min(0.0, max(-1.0, (max_length - buffer - length) / buffer))


def discounted_return(rewards: Sequence[float], discount: float) -> float:
    """Return the discounted sum of a trajectory's turn rewards, seen from its first turn."""
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
    return total


def discounted_turn_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return, for each turn, the discounted sum of its reward and those after it."""
    returns: list[float] = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]


def charged_turn_returns(
    rewards: Sequence[Sequence[float]], charges: Sequence[Sequence[float]] | None, discount: float
) -> list[list[float]]:
    """Return each turn's discounted return, with what is charged on that turn's own return after discounting."""
    returns = [discounted_turn_returns(turns, discount) for turns in rewards]
    if charges is None:
        return returns
    return [
        [value + charge for value, charge in zip(*pair, strict=True)]
        for pair in zip(returns, charges, strict=True)
    ]


def placed_rewards(rewards: Sequence[Sequence[float]], stream: TokenStream, mask: Tensor) -> Tensor:
    """Return turn rewards on the last sampled token of each turn, float64 `[rows, tokens]`.

    Args:
        rewards: Reward of each turn of each trajectory.
        stream: The sampled tokens of the batch.
        mask: True where the policy sampled the token.

    Raises:
        ValueError: If a reward would be lost because its turn has no sampled token.
    """
    placed = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    ends = stream.turn_end.nonzero(as_tuple=True)[0]
    reached = set()
    values = []
    for trajectory, turn in zip(stream.trajectory[ends].tolist(), stream.turn[ends].tolist(), strict=True):
        reached.add((trajectory, turn))
        values.append(rewards[trajectory][turn])
    for trajectory, turns in enumerate(rewards):
        for turn, reward in enumerate(turns):
            if reward and (trajectory, turn) not in reached:
                raise ValueError(
                    f"turn {turn} of trajectory {trajectory} has reward {reward} but no sampled token to carry it"
                )
    placed[stream.row[ends], stream.column[ends]] = torch.tensor(
        values, dtype=torch.float64, device=mask.device
    )
    if bool((placed[~mask] != 0).any()):
        raise AssertionError("a reward lies on a token that the policy did not sample")
    return placed
