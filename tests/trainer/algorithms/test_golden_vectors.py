"""Numbers that other projects' code gives, executed on a CPU, before whitening. The source is named at each."""

import math

import pytest
import torch

from rollgym.trainer.algorithms.advantages import (
    bi_level_advantages,
    generalized_advantages,
    group_advantages,
    whitened,
)
from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.corrections import banded, importance_weights, truncated
from rollgym.trainer.algorithms.gigpo import anchor_groups, gigpo_advantages
from rollgym.trainer.algorithms.group_filters import TopPFilter
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.losses import ppo_surrogate, weighted_surrogate
from rollgym.trainer.algorithms.ratio import log_ratio, sequence_mean
from rollgym.trainer.algorithms.rewards import overlong_penalty
from rollgym.trainer.algorithms.selection import filter_groups


def assert_numbers(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        atol=tolerance,
        rtol=0,
    )


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.2, -0.5, 0]), ("k2", [0.02, 0.125, 0]), ("k3", [0.018731, 0.148721, 0])],
)
def test_kl_estimators(estimator, expected):
    # verl core_algos.kl_penalty
    logprobs, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    assert_numbers(kl_estimate(logprobs, reference, estimator), expected, 1e-6)


EIGHT = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("baseline", "scale", "winner", "loser"),
    [
        ("mean", "group_std", 1.620182, -0.540061),  # verl compute_grpo_outcome_advantage
        ("mean", "none", 0.75, -0.25),  # verl with norm_adv_by_std_in_grpo=False (Dr. GRPO)
        ("leave_one_out", "none", 0.857143, -0.285714),  # verl compute_rloo_outcome_advantage
    ],
)
def test_group_advantages(baseline, scale, winner, loser):
    advantages = group_advantages(EIGHT, torch.zeros(8, dtype=torch.int64), baseline=baseline, scale=scale)
    assert_numbers(advantages, [winner if score else loser for score in EIGHT.tolist()])


def test_group_deviation_is_unbiased():
    # verl: torch.std of [1,0,0,1,0,0,0,0] is 0.462910; the biased one would be 0.433013
    advantages = group_advantages(EIGHT, torch.zeros(8, dtype=torch.int64), epsilon=1e-12)
    assert_numbers(0.75 / advantages[0], 0.462910, 1e-6)


TWO_GROUPS = torch.tensor([1.0, 0, 1, 1, 1, 0])
TWO_GROUP_IDS = torch.tensor([0, 0, 1, 1, 1, 1])


def test_batch_scale_of_raw_scores():
    # LitePPO: TRL scale_rewards="batch", ROLL norm_mean group / norm_std batch; batch deviation 0.5164
    advantages = group_advantages(TWO_GROUPS, TWO_GROUP_IDS, scale="batch_std")
    assert_numbers(advantages, [0.9682, -0.9682, 0.4841, 0.4841, 0.4841, -1.4524], 1e-4)


def test_centred_then_whitened_with_a_token_per_row():
    # REINFORCE++-baseline: verl; deviation of the centred scores 0.5
    centred = group_advantages(TWO_GROUPS, TWO_GROUP_IDS, scale="none")
    assert_numbers(centred, [0.5, -0.5, 0.25, 0.25, 0.25, -0.75])
    mask = torch.ones(6, 1, dtype=torch.bool)
    assert_numbers(whitened(centred[:, None], mask)[:, 0], [1, -1, 0.5, 0.5, 0.5, -1.5])


def test_centred_then_whitened_counts_tokens():
    # REINFORCE++-baseline: OpenRLHF reinforce_baseline, lengths 1,3,2,2,4,4: mean -0.125, biased deviation 0.4677
    centred = group_advantages(TWO_GROUPS, TWO_GROUP_IDS, scale="none")
    lengths = torch.tensor([1, 3, 2, 2, 4, 4])
    mask = torch.arange(4)[None] < lengths[:, None]
    result = whitened(centred[:, None].expand(6, 4), mask, unbiased=False)
    assert_numbers(result[:, 0], [1.3363, -0.8018, 0.8018, 0.8018, 0.8018, -1.3363], 1e-4)


GAE_REWARDS = torch.tensor([[0, 0.5, 0, 0, 0, 1]])
GAE_VALUES = torch.tensor([[0.1, 0.2, 9, 9, 0.3, 0.4]])
GAE_MASK = torch.tensor([[True, True, False, False, True, True]])


@pytest.mark.parametrize(
    ("discount", "trace", "expected"),
    [
        (1.0, 0.9, [1.1584, 1.1760, 0.6400, 0.6000]),
        (0.9, 0.9, [0.899930, 1.012260, 0.546, 0.6]),
        (1.0, 1.0, [1.4, 1.3, 0.7, 0.6]),
    ],
)
def test_generalized_advantages(discount, trace, expected):
    # verl compute_gae_advantage_return
    advantages, returns = generalized_advantages(
        GAE_REWARDS, GAE_VALUES, GAE_MASK, gamma=discount, gae_lambda=trace
    )
    assert_numbers(advantages[GAE_MASK], expected)
    assert_numbers(returns[GAE_MASK], [a + v for a, v in zip(expected, [0.1, 0.2, 0.3, 0.4], strict=True)])


def test_bi_level_advantages():
    # RAGEN compute_bi_level_gae_advantage_return, gamma 1, lambda 0.9, turn gamma 0.95
    turn_end = torch.tensor([[False, True, False, False, False, True]])
    advantages, returns = bi_level_advantages(
        GAE_REWARDS, GAE_VALUES, GAE_MASK, turn_end, turn_discount=0.95, gamma=1.0, gae_lambda=0.9
    )
    assert_numbers(advantages[GAE_MASK], [1.1737, 1.1930, 0.6400, 0.6000])
    assert_numbers(returns[GAE_MASK], [1.2737, 1.3930, 0.9400, 1.0])


@pytest.mark.parametrize(
    ("count_steps", "normalise_std", "expected"),
    [
        (False, False, [0.768333, 0.5, 0.865833, -1.134167, -0.5]),
        (
            False,
            True,
            [0.707106 + 0.486671, 0.707106, 0.707106 + 0.663505, -0.707106 - 1.150176, -0.707106],
        ),
        (True, False, [0.668333, 0.4, 0.765833, -1.234167, -0.6]),
        (True, True, [1.216966, 0.730295, 1.393800, -2.245619, -1.095443]),
    ],
)
def test_gigpo(count_steps, normalise_std, expected):
    # verl-agent gigpo/core_gigpo.py
    result = gigpo_advantages(
        [[0, 0, 1], [0, 0]],
        [0, 0],
        anchor_groups([["s0", "s1", "s0"], ["s0", "s2"]], [0, 0]),
        normalise_std=normalise_std,
        count_steps=count_steps,
        turn_discount=0.95,
    )
    assert_numbers([value for turns in result for value in turns], expected, 3e-6)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (1, 0.5, -0.5),
        (1, 1, -1),
        (1, 1.1, -1.1),
        (1, 1.5, -1.28),
        (-1, 0.5, 0.8),
        (-1, 1.1, 1.1),
        (-1, 1.5, 1.5),
        (-1, 4, 3.0),
    ],
)
def test_ppo_surrogate(advantage, ratio, expected):
    # verl compute_policy_loss_vanilla, clip 0.2 / 0.28, dual clip 3
    result = ppo_surrogate(
        torch.tensor([math.log(ratio)]),
        torch.tensor([float(advantage)]),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    assert_numbers(result.loss, [expected], 1e-6)


def test_gspo_ratio_and_clip():
    # verl compute_policy_loss_gspo: mean of log ratios .01, -.02, .04 gives s = 1.010050, bounded by 1.0004
    mask = torch.ones(1, 3, dtype=torch.bool)
    ratio = log_ratio(
        torch.tensor([[0.01, -0.02, 0.04]]),
        torch.zeros(1, 3),
        mask,
        torch.zeros(1, 3, dtype=torch.int64),
        level="sequence",
    )
    assert_numbers(ratio.exp(), [[1.010050] * 3], 1e-6)
    loss = ppo_surrogate(ratio, torch.ones(1, 3), clip_low=3e-4, clip_high=4e-4).loss
    assert_numbers(loss, [[-1.0004] * 3], 1e-6)


@pytest.mark.parametrize(
    ("score", "ratio", "weight"), [(1, 3.0, 1), (-1, 3.0, 1), (-1, 0.25, 0.25), (1, 0.25, 1)]
)
def test_topr_weight(score, ratio, weight):
    # ROLL topr: weight 1 on positive scores, min(max(r, 0), 1) on negative ones
    loss = weighted_surrogate(
        torch.tensor([-2.0]),
        torch.tensor([math.log(ratio)]),
        torch.tensor([float(score)]),
        weight_low=0.0,
        weight_high=1.0,
        applies=torch.tensor([score < 0]),
    ).loss
    assert_numbers(loss, [2.0 * score * weight], 1e-6)


def test_correction_weights():
    # verl rollout_is (cap 2) and IcePop band [.5, 5] on weights 1, e, 1/e
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = importance_weights(torch.tensor([[0.0, 1.0, -1.0]]), torch.zeros(1, 3), mask)
    assert_numbers(truncated(weights, 2.0), [[1, 2, 0.367879]], 1e-6)
    assert_numbers(banded(weights, 0.5, 5.0), [[1, 2.718282, 0]], 1e-6)
    geometric = sequence_mean(weights.log(), mask).exp()
    assert_numbers(geometric, [[1, 1, 1]], 1e-6)


def test_decoupled_ppo():
    # AReaL: prox/behaviour 1.5, u 1.3, A 1, eps 0.2
    mask = torch.ones(1, 1, dtype=torch.bool)
    weight = importance_weights(torch.tensor([[math.log(1.5)]]), torch.zeros(1, 1), mask)
    loss = ppo_surrogate(torch.tensor([[math.log(1.3)]]), torch.ones(1, 1)).loss
    assert_numbers(truncated(weight, None) * loss, [[-1.8]], 1e-6)


@pytest.mark.parametrize(
    ("mode", "horizon", "expected"),
    [
        ("token-mean", None, 2.5),
        ("seq-mean-token-sum", None, 5),
        ("seq-mean-token-mean", None, 3),
        ("seq-mean-token-sum-norm", 4, 1.25),
    ],
)
def test_aggregation(mode, horizon, expected):
    # verl agg_loss
    losses = torch.tensor([[1.0, 2, 3, 100], [4, 100, 100, 100]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert_numbers(aggregate(losses, mask, mode, Denominators.from_mask(mask), horizon), expected)


def test_ragen_top_p_filter():
    # RAGEN rollout_filter.py, top_p linear 0.9 on deviations .5, .4, .3, 0
    groups, returns = [], []
    for group, std in enumerate([0.5, 0.4, 0.3, 0.0]):
        groups += [group, group]
        returns += [0.0, std * math.sqrt(2)]  # the unbiased deviation of 0 and x is x / sqrt 2
    assert filter_groups(TopPFilter(kind="top_p", mass=0.9), groups, returns).kept == [0, 1, 2]


@pytest.mark.parametrize(("length", "penalty"), [(16384, 0), (18432, -0.5), (20480, -1), (30000, -1), (5, 0)])
def test_overlong_penalty(length, penalty):
    # DAPO: Lmax 20480, buffer 4096
    assert overlong_penalty(length, 20480, 4096) == penalty
