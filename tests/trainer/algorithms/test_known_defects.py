"""Mistakes seen in other trainers, one test each, named after what went wrong there."""

import pytest
import torch

from rollgym.trainer.algorithms.advantages import generalized_advantages, group_advantages
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.batch import RowBatch, TrajectoryBatch
from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.gigpo import anchor_groups, gigpo_advantages
from rollgym.trainer.algorithms.objective import critic_loss
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from tests.support.algorithm_cases import random_case


def one_trajectory(rewards, turn_index, **numbers):
    turns = len(rewards)
    index = torch.tensor([turn_index])
    mask = index >= 0
    batch = TrajectoryBatch(
        groups=[0],
        rewards=[rewards],
        format_penalties=[[0.0] * turns],
        valid=[[True] * turns],
        anchors=[[None] * turns],
        tokens=[[turn_index.count(turn) for turn in range(turns)]],
    )
    rows = RowBatch(torch.tensor([0]), mask, index, **numbers)
    return batch, rows


def test_gae_does_not_decay_over_observation_tokens():
    # ROLL and OpenRLHF zero value and reward there but step through: 1.008604, 1.00956 instead of 1.1584, 1.1760.
    rewards, values = torch.tensor([[0, 0.5, 0, 0, 0, 1]]), torch.tensor([[0.1, 0.2, 9, 9, 0.3, 0.4]])
    mask = torch.tensor([[True, True, False, False, True, True]])
    stepped_through, _ = generalized_advantages(
        rewards * mask, values * mask, torch.ones_like(mask), gamma=1.0, gae_lambda=0.9
    )
    assert stepped_through[0, :2].tolist() == pytest.approx([1.008604, 1.00956])
    skipped, _ = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=0.9)
    assert skipped[0, :2].tolist() == pytest.approx([1.1584, 1.1760])


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
def test_turn_ends_do_not_hang_on_rewards_being_nonzero(rewards):
    # RAGEN finds turn ends by non-zero rewards: a turn with reward 0 is merged, and the last one may not be 0.
    algorithm = resolve_preset(
        "ppo",
        {"advantage": {"kind": "bi_level_gae", "turn_discount": 0.5, "gae_lambda": 0.5, "whiten": False}},
    )
    batch, rows = one_trajectory(rewards, [0, 0, -1, 1, 1], values=torch.tensor([[0.1, 0.2, 9.0, 0.3, 0.4]]))
    result = compute_advantages(algorithm, batch, rows)
    last = rewards[1] - 0.4
    first = rewards[0] + 0.5 * 0.4 - 0.2 + 0.5 * 0.5 * last
    assert result.advantages[0, 4].item() == pytest.approx(last)
    assert result.advantages[0, 1].item() == pytest.approx(first)
    assert result.advantages[0, 0].item() == pytest.approx((0.2 - 0.1) + 0.5 * first)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
@pytest.mark.parametrize("width", [3, 7])
def test_aggregation_masks_and_never_divides_by_the_padded_width(mode, width):
    # ROLL's token-mean ignores the mask; ROLL, and verl with no horizon set, divide rows by their padded width.
    mask = torch.zeros(2, width, dtype=torch.bool)
    mask[0, :3] = mask[1, :1] = True
    losses = torch.where(mask, 1.0, 50.0)
    expected = {"token-mean": 1.0, "seq-mean-token-sum": 2.0, "seq-mean-token-mean": 1.0}[mode]
    assert aggregate(losses, mask, mode, Denominators.from_mask(mask)).item() == expected


def test_micro_batches_use_the_denominator_of_the_batch():
    # Averages of micro-batch means weigh tokens of small micro-batches more (TRL, verl, open-instruct, NeMo-RL).
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    losses = torch.tensor([[1.0, 1.0, 1.0, 1.0], [6.0, 0.0, 0.0, 0.0]])
    denominators = Denominators.from_mask(mask)
    parts = [
        aggregate(losses[row : row + 1], mask[row : row + 1], "token-mean", denominators) for row in (0, 1)
    ]
    assert sum(parts).item() == pytest.approx(2.0)
    mean_of_means = (1.0 + 6.0) / 2
    assert sum(parts).item() != mean_of_means


def test_group_statistics_can_count_episodes_and_not_steps():
    # GiGPO's code weighs an episode by its steps: here the mean of returns 1 and 0 is 0.9 instead of 0.5.
    rewards = [[0.0] * 8 + [1.0], [0.0]]
    anchors = anchor_groups([[None] * 9, [None]], [0, 0])
    by_episode = gigpo_advantages(rewards, [0, 0], anchors, count_steps=False)
    by_step = gigpo_advantages(rewards, [0, 0], anchors, count_steps=True)
    assert by_episode[1] == [-0.5]
    assert by_step[1] == pytest.approx([-0.9])
    # GRPO counts episodes unless told otherwise.
    assert PRESETS["grpo"].advantage.unit == "trajectory"


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_rows_without_tokens_are_zero_and_not_nan(mode):
    mask = torch.tensor([[True, True], [False, False]])
    losses = torch.tensor([[2.0, 4.0], [torch.nan, torch.inf]], requires_grad=True)
    total = aggregate(losses, mask, mode, Denominators.from_mask(mask), 2 if mode.endswith("norm") else None)
    total.backward()
    assert total.isfinite()
    assert losses.grad[1].tolist() == [0.0, 0.0]
    empty = aggregate(losses[1:], mask[1:], mode, Denominators(0, 0), 2 if mode.endswith("norm") else None)
    assert empty.item() == 0


def test_returns_outside_the_mask_are_zero_and_the_value_loss_never_reads_them():
    # verl leaves garbage there.
    case = random_case(3)
    rows = case.rows()
    result = compute_advantages(PRESETS["ppo"], case.batch, rows.row_batch())
    assert not result.returns[~rows.mask].any()
    denominators = Denominators.from_mask(rows.mask)
    poisoned = torch.where(rows.mask, result.returns, torch.inf)
    values = rows.numbers["values"] + 0.1
    clean, _ = critic_loss(
        PRESETS["ppo"], values, rows.numbers["values"], result.returns, rows.mask, denominators
    )
    same, _ = critic_loss(PRESETS["ppo"], values, rows.numbers["values"], poisoned, rows.mask, denominators)
    assert clean.isfinite()
    assert clean == same


def test_a_group_of_one_is_zero_unless_the_raw_score_is_asked_for():
    # verl and verl-agent give A = R: a lone success is reinforced without a baseline.
    scores, groups = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([7, 9, 9])
    for baseline in ("mean", "leave_one_out"):
        for scale in ("group_std", "batch_std", "none"):
            assert group_advantages(scores, groups, baseline=baseline, scale=scale)[0] == 0
    assert group_advantages(scores, groups, singleton="raw")[0] == 3


def test_each_turn_keeps_its_own_reward():
    # AReaL overwrote earlier turns with the last one's normalised value.
    algorithm = resolve_preset(
        "grpo",
        {"advantage": {"kind": "turn", "baseline": "none", "scale": "none", "turn_discount": 0.5}},
    )
    batch, rows = one_trajectory([1.0, 2.0, 4.0], [-1, 0, 0, -1, 1, -1, 2])
    result = compute_advantages(algorithm, batch, rows)
    assert result.advantages[0].tolist() == [0, 3, 3, 0, 4, 0, 4]


def test_equal_returns_give_exactly_zero():
    # float32 residue divided by (residue + 1e-6) reaches 0.24 in verl.
    scores = torch.full((7,), 0.1)
    for scale in ("group_std", "batch_std"):
        assert not group_advantages(scores, torch.zeros(7, dtype=torch.int64), scale=scale).any()
