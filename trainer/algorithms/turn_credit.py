"""Advantages that all tokens of a turn share, by kind."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollgym.trainer.algorithms.advantage import TurnCredit, Update
from rollgym.trainer.algorithms.advantages import gdpo_advantages, group_advantages, informative_factor
from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.gigpo import anchor_groups, gigpo_advantages
from rollgym.trainer.algorithms.hgpo import hgpo_advantages
from rollgym.trainer.algorithms.rewards import (
    TurnValues,
    charged_turn_returns,
    discounted_return,
    normalised_rewards,
    turn_charges,
    turn_rewards,
)
from rollgym.trainer.algorithms.state import (
    AlgorithmState,
    moving_baseline_advantages,
    with_averages,
    with_outcomes,
    worth_of,
)
from rollgym.trainer.core.numbers import finite_number
from rollgym.trainer.core.plugins import load_plugin

if TYPE_CHECKING:
    from rollgym.trainer.algorithms.advantage_settings import (
        CustomAdvantage,
        GdpoAdvantage,
        GigpoAdvantage,
        GroupAdvantage,
        HgpoAdvantage,
        MovingBaselineAdvantage,
        SpoAdvantage,
        TurnAdvantage,
    )


def returns_of(shaping: RewardSettings, batch: TrajectoryBatch) -> list[float]:
    """Return what each trajectory scored: its shaped rewards, before any normalisation."""
    return total_scores(turn_rewards(shaping, batch), turn_charges(shaping, batch))


def _each_turn(advantages: Tensor, rewards: TurnValues) -> TurnValues:
    """Give every turn of a trajectory its advantage."""
    return [[value] * len(turns) for value, turns in zip(advantages.tolist(), rewards, strict=True)]


def group_credit(advantage: "GroupAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn the episode's return relative to its group."""
    batch, rewards = credit.batch, credit.rewards
    groups = torch.tensor(batch.groups, dtype=torch.int64)
    returns = [[discounted_return(turns, advantage.turn_discount)] for turns in rewards]
    scores = torch.tensor(total_scores(returns, credit.charges), dtype=torch.float64)
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    greedy = None
    if advantage.baseline == "greedy":
        greedy = greedy_scores(credit.shaping, batch, discount=advantage.turn_discount)
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
    if advantage.factor != "none":
        relative = informative_factor(scores, groups, advantage.factor) * relative
    return _each_turn(relative, rewards)


def greedy_scores(shaping: RewardSettings, batch: TrajectoryBatch, *, discount: float = 1.0) -> Tensor:
    """Return what the greedy episode of each trajectory's group scored, by the same rules as its own.

    Raises:
        ValueError: If a group has none.
    """
    if batch.greedy is None:
        raise ValueError("baseline 'greedy' reads a greedy episode of each group, and none was played")
    charges = turn_charges(shaping, batch.greedy)
    returns = [[discounted_return(turns, discount)] for turns in turn_rewards(shaping, batch.greedy)]
    of_group = dict(zip(batch.greedy.groups, total_scores(returns, charges), strict=True))
    if missing := [group for group in batch.groups if group not in of_group]:
        raise ValueError(f"no greedy episode of group {missing[0]} was played")
    return torch.tensor([of_group[group] for group in batch.groups], dtype=torch.float64)


def return_credit(advantage: "TurnAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn its return relative to those of the group's turns."""
    rewards = credit.rewards
    lengths = torch.tensor([len(turns) for turns in rewards], dtype=torch.int64)
    steps = charged_turn_returns(rewards, credit.charges, advantage.turn_discount)
    flat = group_advantages(
        torch.tensor([value for turns in steps for value in turns], dtype=torch.float64),
        torch.tensor(credit.batch.groups, dtype=torch.int64).repeat_interleave(lengths),
        baseline=advantage.baseline,
        scale=advantage.scale,
        singleton=advantage.singleton,
        epsilon=advantage.epsilon,
    )
    values = iter(flat.tolist())
    return [[next(values) for _ in turns] for turns in rewards]


def gigpo_credit(advantage: "GigpoAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn its episode's advantage, and its own among turns that began in the same state."""
    batch = credit.batch
    return gigpo_advantages(
        credit.rewards,
        batch.groups,
        anchor_groups(batch.anchors, batch.groups, advantage.similarity),
        charges=credit.charges,
        normalise_std=advantage.normalisation == "mean_std_norm",
        step_weight=advantage.step_weight,
        turn_discount=advantage.turn_discount,
        count_steps=advantage.unit == "step",
        singleton_raw=advantage.singleton == "raw",
        epsilon=advantage.epsilon,
    )


def hgpo_credit(advantage: "HgpoAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn its advantage among turns of equal state and history."""
    return hgpo_advantages(
        credit.rewards,
        credit.batch.groups,
        credit.batch.anchors,
        charges=credit.charges,
        normalise_std=advantage.normalisation == "mean_std_norm",
        history=advantage.history,
        length_weight=advantage.length_weight,
        episode_group=advantage.episode_group,
        turn_discount=advantage.turn_discount,
        epsilon=advantage.epsilon,
    )


def gdpo_credit(advantage: "GdpoAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn the weighted sum of each reward's advantages (GDPO, arXiv:2601.05242, equations 4 to 6)."""
    batch = credit.batch
    names = sorted({name for turns in batch.parts for parts in turns for name in parts})
    if not names:
        raise ValueError(
            "advantage 'gdpo' reads several rewards a turn, and no turn names any: an environment gives them in "
            "info['reward_parts'], a reward function returns them by name"
        )
    if unknown := sorted(set(advantage.weights) - set(names)):
        raise ValueError(f"algorithm.advantage.weights names {unknown}; there are {names}")
    scores = [[sum(parts.get(name, 0.0) for parts in turns) for turns in batch.parts] for name in names]
    relative = gdpo_advantages(
        torch.tensor(scores, dtype=torch.float64),
        torch.tensor(batch.groups, dtype=torch.int64),
        weights=[advantage.weights.get(name, 0.0) for name in names] if advantage.weights else None,
        scale=advantage.scale,
        singleton=advantage.singleton,
        epsilon=advantage.epsilon,
    )
    return _each_turn(relative, credit.rewards)


def spo_credit(advantage: "SpoAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn how far its episode did better than its task was known to be worth."""
    keys = tracked_keys(advantage, credit.batch)
    worths = [worth_of(advantage, credit.state, key).value for key in keys]
    ahead = torch.tensor(total_scores(credit.rewards, credit.charges), dtype=torch.float64)
    ahead = ahead - torch.tensor(worths, dtype=torch.float64)
    deviation = float(ahead.std()) if len(ahead) > 1 else 0.0
    return _each_turn((ahead - ahead.mean()) / (deviation + advantage.epsilon), credit.rewards)


def spo_remembered(advantage: "SpoAdvantage", state: AlgorithmState, update: Update) -> AlgorithmState:
    """Return the state with how far the policy moved, and what these episodes say of their tasks."""
    state = replace(state, moved=state.moved + update.moved)
    keys = tracked_keys(advantage, update.batch)
    return with_outcomes(advantage, state, keys, returns_of(update.shaping, update.batch))


def moving_baseline_credit(advantage: "MovingBaselineAdvantage", credit: TurnCredit) -> TurnValues:
    """Give every turn how far its episode did better than the average of those before it."""
    keys = tracked_keys(advantage, credit.batch)
    scores = total_scores(credit.rewards, credit.charges)
    found, _ = moving_baseline_advantages(scores, keys, credit.state.baselines, advantage.decay)
    return [[value] * len(turns) for value, turns in zip(found, credit.rewards, strict=True)]


def moving_baseline_remembered(
    advantage: "MovingBaselineAdvantage", state: AlgorithmState, update: Update
) -> AlgorithmState:
    """Return the state with the returns of these episodes in their averages."""
    shaping, batch = update.shaping, update.batch
    rewards = normalised_rewards(shaping, turn_rewards(shaping, batch), state.returns)
    scores = total_scores(rewards, turn_charges(shaping, batch))
    return with_averages(advantage, state, tracked_keys(advantage, batch), scores)


def tracked_keys(
    advantage: "SpoAdvantage | MovingBaselineAdvantage", batch: TrajectoryBatch
) -> Sequence[str]:
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


def custom_credit(advantage: "CustomAdvantage", credit: TurnCredit) -> TurnValues:
    """Return what a function of the user's makes of a batch.

    Raises:
        PluginError: If it raises, or does not return an advantage for each turn.
        InvalidNumberError: If one of them is not a finite number.
    """
    plugin = load_plugin(advantage.function, "algorithm.advantage.function")
    batch = replace(credit.batch, rewards=credit.rewards)
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
