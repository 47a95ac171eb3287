"""Weights and rejection at every level, against loops over tokens; verl's rollout_corr_helper names the options."""

import math

import pytest
import torch

from rollgym.trainer.algorithms.corrections import (
    banded,
    importance_weights,
    interpolated_logprobs,
    normalised,
    rejection_mask,
    truncated,
    version_shares,
)
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.token_settings import CORRECTIONS

OLD = torch.tensor([[-1.0, -0.5, -2.0, -0.3], [-0.9, -1.5, -0.2, 9.0], [-0.7, 9.0, 9.0, 9.0]])
BEHAVIOUR = torch.tensor([[-1.3, -0.4, -1.2, -0.3], [-1.0, -1.1, -0.9, 5.0], [-0.65, 5.0, 5.0, 5.0]])
MASK = torch.tensor([[True] * 4, [True, True, True, False], [True, False, False, False]])
TURNS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])


def moves(row):
    return [float(OLD[row, at] - BEHAVIOUR[row, at]) for at in range(4) if MASK[row, at]]


def sampled(table):
    return [[round(float(table[row, at]), 9) for at in range(4) if MASK[row, at]] for row in range(3)]


def close(table, expected):
    for row, line in enumerate(sampled(table)):
        assert line == pytest.approx(expected[row], abs=1e-6)


def by_row(of_moves):
    return [[of_moves(moves(row))] * len(moves(row)) for row in range(3)]


def test_weight_of_a_sequence_is_the_product():
    weights = importance_weights(OLD, BEHAVIOUR, MASK, level="sequence")
    close(weights, by_row(lambda each: math.exp(sum(each))))
    assert not weights.requires_grad


def test_geometric_weight_is_the_mean():
    close(
        importance_weights(OLD, BEHAVIOUR, MASK, level="geometric"),
        by_row(lambda each: math.exp(sum(each) / len(each))),
    )


def test_weight_of_a_turn_is_its_geometric_mean():
    segments = 2 * torch.arange(3)[:, None] + TURNS
    weights = importance_weights(OLD, BEHAVIOUR, MASK, level="turn", segment=segments)
    first = math.exp((0.3 - 0.1) / 2)
    second = math.exp((-0.8 + 0.0) / 2)
    assert sampled(weights)[0] == pytest.approx([first, first, second, second], abs=1e-6)


def test_a_sequence_may_lie_in_several_rows():
    together = torch.tensor([[0], [0], [1]]).expand(3, 4)
    weights = importance_weights(OLD, BEHAVIOUR, MASK, level="sequence", segment=together)
    total = math.exp(sum(moves(0)) + sum(moves(1)))
    assert [value for line in sampled(weights)[:2] for value in line] == pytest.approx([total] * 7, abs=1e-6)


def test_truncation_has_a_floor():
    # OpenRLHF: [0.5, 5]
    assert truncated(torch.tensor([0.1, 1.0, 9.0]), 5.0, 0.5).tolist() == [0.5, 1.0, 5.0]
    assert truncated(torch.tensor([0.1, 9.0]), None, 0.5).tolist() == [0.5, 9.0]


def test_weights_of_mean_one_over_tokens_and_over_sequences():
    # verl rollout_is_batch_normalize
    weights = importance_weights(OLD, BEHAVIOUR, MASK)
    mean = sum(math.exp(each) for row in range(3) for each in moves(row)) / 8
    close(normalised(weights, MASK), [[math.exp(each) / mean for each in moves(row)] for row in range(3)])
    rows = torch.arange(3)[:, None].expand(3, 4)
    of_rows = importance_weights(OLD, BEHAVIOUR, MASK, level="sequence")
    mean = sum(math.exp(sum(moves(row))) for row in range(3)) / 3
    close(normalised(of_rows, MASK, rows), by_row(lambda each: math.exp(sum(each)) / mean))
    assert normalised(torch.zeros(3, 4), MASK).tolist() == torch.zeros(3, 4).tolist()


MEASURES = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.exp(d) - 1 - d,
}
STATISTICS = {"mean": lambda each: sum(each) / len(each), "sum": sum, "max": max}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_rejection_of_sequences(measure, statistic):
    # verl seq_{mean,sum,max}_k{1,2,3}
    rows = torch.arange(3)[:, None].expand(3, 4)
    values = [STATISTICS[statistic]([MEASURES[measure](d) for d in moves(row)]) for row in range(3)]
    high = sorted(values)[1] + 1e-6
    kept = rejection_mask(OLD, BEHAVIOUR, MASK, measure=measure, statistic=statistic, high=high, segment=rows)
    assert sampled(kept) == [[float(value <= high)] * len(moves(row)) for row, value in enumerate(values)]


def test_rejection_of_tokens_by_ratio_and_probability():
    kept = rejection_mask(OLD, BEHAVIOUR, MASK, low=0.6, high=1.2)
    assert sampled(kept) == [[float(0.6 <= math.exp(d) <= 1.2) for d in moves(row)] for row in range(3)]
    apart = [
        [
            math.exp(float(OLD[row, at])) - math.exp(float(BEHAVIOUR[row, at]))
            for at in range(4)
            if MASK[row, at]
        ]
        for row in range(3)
    ]
    kept = rejection_mask(OLD, BEHAVIOUR, MASK, measure="probability", low=-0.2, high=0.2)
    assert sampled(kept) == [[float(abs(each) <= 0.2) for each in line] for line in apart]


def test_binary_kl_is_the_larger_of_both_directions():
    # verl's KPop: max(KL(p || q), KL(q || p)) of the two-way choice.
    def divergence(p, q):
        return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))

    p, q = math.exp(-0.2), math.exp(-0.9)
    far = max(divergence(p, q), divergence(q, p))
    old, behaviour, mask = torch.tensor([[-0.2]]), torch.tensor([[-0.9]]), torch.tensor([[True]])
    assert rejection_mask(old, behaviour, mask, measure="binary_kl", high=far + 1e-5).item()
    assert not rejection_mask(old, behaviour, mask, measure="binary_kl", high=far - 1e-5).item()


def test_a_veto_rejects_a_sequence_for_one_token():
    rows = torch.arange(3)[:, None].expand(3, 4)
    kept = rejection_mask(OLD, BEHAVIOUR, MASK, statistic="all", low=0.5, high=2.0, segment=rows)
    inside = [all(0.5 <= math.exp(d) <= 2.0 for d in moves(row)) for row in range(3)]
    assert inside == [False, False, True]
    assert sampled(kept) == [[float(flag)] * len(moves(row)) for row, flag in enumerate(inside)]


def test_only_what_failed_is_rejected_by_opsm():
    # slime compute_opsm_mask: A < 0 and mean(old - lp) > delta
    rows = torch.arange(3)[:, None].expand(3, 4)
    advantages = torch.tensor([[-1.0], [-1.0], [1.0]]).expand(3, 4)
    kept = rejection_mask(OLD, BEHAVIOUR, MASK, measure="k1", high=0.1, segment=rows, advantages=advantages)
    far = [-sum(moves(row)) / len(moves(row)) > 0.1 for row in range(3)]
    assert far == [True, False, False]
    assert sampled(kept) == [[0.0] * 4, [1.0] * 3, [1.0]]


def test_what_lies_outside_the_mask_is_never_read():
    garbage = torch.where(MASK, OLD, torch.nan)
    rows = torch.arange(3)[:, None].expand(3, 4)
    for level in ("token", "turn", "geometric", "sequence"):
        assert importance_weights(garbage, BEHAVIOUR, MASK, level=level, segment=rows).isfinite().all()
    assert (
        rejection_mask(garbage, BEHAVIOUR, MASK, measure="k3", statistic="max", high=1.0, segment=rows).sum()
        == 8
    )


def test_interpolated_log_probabilities():
    # AReaL compute_prox_logp_approximations, loglinear: alpha = (v - 1 - v_b) / (v - v_b)
    shares = version_shares(torch.tensor([5, 4, 2, -1, 6]), current_version=6)
    assert shares.tolist() == pytest.approx([0.0, 0.5, 0.75, 0.0, 0.0])
    guess = interpolated_logprobs(
        torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -3.0]), torch.tensor([0.5, 0.75])
    )
    assert guess.tolist() == pytest.approx([-1.5, -1.5])


def test_a_band_drops_whole_sequences():
    # TRL sequence_mask: the ratio of the sequence, 0 above 3
    weights = importance_weights(OLD, BEHAVIOUR, MASK, level="sequence")
    close(
        banded(weights, 0.0, 1.0),
        by_row(lambda each: math.exp(sum(each)) if math.exp(sum(each)) <= 1.0 else 0.0),
    )


@pytest.mark.parametrize("name", CORRECTIONS)
def test_every_named_correction_can_be_chosen(name):
    settings = resolve_preset("grpo", {"correction": name})
    assert settings.correction == CORRECTIONS[name].settings
    assert resolve_preset("grpo", settings.model_dump()) == settings
