"""Advantages that all tokens of a turn share, by kind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantage_settings import (
    GdpoAdvantage,
    GroupAdvantage,
    MovingBaselineAdvantage,
    SpoAdvantage,
    TurnAdvantage,
)
from rollgym.trainer.algorithms.advantages import group_advantages, informative_factor
from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.gdpo import gdpo_advantages
from rollgym.trainer.algorithms.gigpo import anchor_groups, gigpo_advantages
from rollgym.trainer.algorithms.hgpo import hgpo_advantages
from rollgym.trainer.algorithms.rewards import (
    TurnValues,
    charged_turn_returns,
    discounted_return,
    turn_charges,
    turn_rewards,
)
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.state import AlgorithmState, moving_baseline_advantages, worth_of
from rollgym.trainer.core.numbers import finite_number
from rollgym.trainer.core.plugins import Plugin, load_plugin


def returns_of(settings: AlgorithmSettings, batch: TrajectoryBatch) -> list[float]:
    """Return what each trajectory scored: its shaped rewards, before any normalisation."""
    return total_scores(turn_rewards(settings.reward, batch), turn_charges(settings.reward, batch))


def turn_advantages(
    settings: AlgorithmSettings,
    batch: TrajectoryBatch,
    rewards: TurnValues,
    charges: TurnValues | None,
    state: AlgorithmState,
) -> TurnValues:
    """Return the advantage of every turn, for the kinds that give all tokens of a turn the same.

    Args:
        settings: The algorithm.
        batch: The episodes.
        rewards: Reward of each turn, as everything but filters reads it.
        charges: Added to each turn's own return after discounting; nothing if None.
        state: What is remembered of earlier steps.
    """
    advantage = settings.advantage
    match advantage.kind:
        case "group":
            return _each_turn(_group_advantages(settings, advantage, batch, rewards, charges), rewards)
        case "turn":
            return _return_advantages(advantage, batch, rewards, charges)
        case "gdpo":
            return _each_turn(_separate_advantages(advantage, batch), rewards)
        case "spo":
            return _each_turn(_tracked_advantages(advantage, batch, rewards, charges, state), rewards)
        case "moving_baseline":
            keys = tracked_keys(advantage, batch)
            found, _ = moving_baseline_advantages(
                total_scores(rewards, charges), keys, state.baselines, advantage.decay
            )
            return [[value] * len(turns) for value, turns in zip(found, rewards, strict=True)]
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
        case "hgpo":
            return hgpo_advantages(
                rewards,
                batch.groups,
                batch.anchors,
                charges=charges,
                normalise_std=advantage.normalisation == "mean_std_norm",
                history=advantage.history,
                length_weight=advantage.length_weight,
                episode_group=advantage.episode_group,
                turn_discount=advantage.turn_discount,
                epsilon=advantage.epsilon,
            )
        case "custom":
            plugin = load_plugin(advantage.function, "algorithm.advantage.function")
            return _custom_advantages(plugin, replace(batch, rewards=rewards))
        case "gae" | "bi_level_gae" | "token_return" | "optimal_token":
            raise ValueError(f"advantage '{advantage.kind}' is computed per token")
        case _:
            assert_never(advantage)


def _each_turn(advantages: Tensor, rewards: TurnValues) -> TurnValues:
    """Give every turn of a trajectory its advantage."""
    return [[value] * len(turns) for value, turns in zip(advantages.tolist(), rewards, strict=True)]


def _group_advantages(
    settings: AlgorithmSettings,
    advantage: GroupAdvantage,
    batch: TrajectoryBatch,
    rewards: TurnValues,
    charges: TurnValues | None,
) -> Tensor:
    groups = torch.tensor(batch.groups, dtype=torch.int64)
    returns = [[discounted_return(turns, advantage.turn_discount)] for turns in rewards]
    scores = torch.tensor(total_scores(returns, charges), dtype=torch.float64)
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    greedy = None
    if advantage.baseline == "greedy":
        greedy = greedy_scores(settings, batch, discount=advantage.turn_discount)
    relative = group_advantages(
        scores,
        groups,
        baseline=advantage.baseline,
        scale=advantage.scale,
        singleton=advantage.singleton,
        epsilon=advantage.epsilon,
        counts=lengths if advantage.unit == "step" else None,
        biased=advantage.biased,
        lengths=torch.tensor([float(sum(tokens)) for tokens in batch.tokens], dtype=torch.float64),
        greedy=greedy,
        shift=advantage.baseline_shift,
    )
    if advantage.factor == "none":
        return relative
    return informative_factor(scores, groups, advantage.factor) * relative


def greedy_scores(settings: AlgorithmSettings, batch: TrajectoryBatch, *, discount: float = 1.0) -> Tensor:
    """Return what the greedy episode of each trajectory's group scored, by the same rules as its own.

    Raises:
        ValueError: If a group has none.
    """
    if batch.greedy is None:
        raise ValueError("baseline 'greedy' reads a greedy episode of each group, and none was played")
    charges = turn_charges(settings.reward, batch.greedy)
    returns = [[discounted_return(turns, discount)] for turns in turn_rewards(settings.reward, batch.greedy)]
    of_group = dict(zip(batch.greedy.groups, total_scores(returns, charges), strict=True))
    if missing := [group for group in batch.groups if group not in of_group]:
        raise ValueError(f"no greedy episode of group {missing[0]} was played")
    return torch.tensor([of_group[group] for group in batch.groups], dtype=torch.float64)


def _return_advantages(
    advantage: TurnAdvantage, batch: TrajectoryBatch, rewards: TurnValues, charges: TurnValues | None
) -> TurnValues:
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    steps = charged_turn_returns(rewards, charges, advantage.turn_discount)
    flat = group_advantages(
        torch.tensor([value for turns in steps for value in turns], dtype=torch.float64),
        torch.tensor(batch.groups, dtype=torch.int64).repeat_interleave(lengths),
        baseline=advantage.baseline,
        scale=advantage.scale,
        singleton=advantage.singleton,
        epsilon=advantage.epsilon,
    )
    values = iter(flat.tolist())
    return [[next(values) for _ in turns] for turns in rewards]


def _separate_advantages(advantage: GdpoAdvantage, batch: TrajectoryBatch) -> Tensor:
    """Return the weighted sum of each reward's advantages in its group (GDPO, arXiv:2601.05242, equations 4 to 6)."""
    names = sorted({name for turns in batch.parts for parts in turns for name in parts})
    if not names:
        raise ValueError(
            "advantage 'gdpo' reads several rewards a turn, and no turn names any: an environment gives them in "
            "info['reward_parts'], a reward function returns them by name"
        )
    if unknown := sorted(set(advantage.weights) - set(names)):
        raise ValueError(f"algorithm.advantage.weights names {unknown}; there are {names}")
    scores = [[sum(parts.get(name, 0.0) for parts in turns) for turns in batch.parts] for name in names]
    return gdpo_advantages(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(batch.groups, dtype=torch.int64),
        weights=[advantage.weights.get(name, 0.0) for name in names] if advantage.weights else None,
        scale=advantage.scale,
        singleton=advantage.singleton,
        epsilon=advantage.epsilon,
    )


def _tracked_advantages(
    advantage: SpoAdvantage,
    batch: TrajectoryBatch,
    rewards: TurnValues,
    charges: TurnValues | None,
    state: AlgorithmState,
) -> Tensor:
    keys = tracked_keys(advantage, batch)
    worths = [worth_of(advantage, state, key).value for key in keys]
    ahead = torch.tensor(total_scores(rewards, charges), dtype=torch.float64)
    ahead = ahead - torch.tensor(worths, dtype=torch.float64)
    deviation = float(ahead.std()) if len(ahead) > 1 else 0.0
    return (ahead - ahead.mean()) / (deviation + advantage.epsilon)


def tracked_keys(advantage: SpoAdvantage | MovingBaselineAdvantage, batch: TrajectoryBatch) -> Sequence[str]:
    """Return under which key the worth of each trajectory's task is remembered.

    Raises:
        ValueError: If the batch does not say it.
    """
    keys = batch.tasks if advantage.tracks == "task" else batch.domains
    if len(keys) != len(batch):
        raise ValueError(
            f"advantage '{advantage.kind}' reads the {advantage.tracks} of each episode, which is not given"
        )
    return keys


def _custom_advantages(plugin: Plugin, batch: TrajectoryBatch) -> TurnValues:
    """Return what a function of the user's makes of a batch.

    Raises:
        PluginError: If it raises, or does not return an advantage for each turn.
        InvalidNumberError: If one of them is no number to compute with.
    """
    expected = "one advantage per turn of each trajectory"
    found = [plugin.elements(part, expected) for part in plugin.elements(plugin(batch.copied()), expected)]
    if [len(part) for part in found] != [len(part) for part in batch.rewards]:
        raise plugin.broken(f"must return {expected}")
    return [[finite_number(value, f"an advantage of {plugin.path}") for value in part] for part in found]


def total_scores(rewards: TurnValues, charges: TurnValues | None) -> list[float]:
    """Return what each trajectory scored in all."""
    scores = [sum(turns) for turns in rewards]
    if charges is None:
        return scores
    return [score + sum(turns) for score, turns in zip(scores, charges, strict=True)]
