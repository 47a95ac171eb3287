import math
from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators, aggregate, share
from rollgym.trainer.algorithms.corrections import importance_weights, mismatch_metrics
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.losses import value_surrogate, weighted_surrogate
from rollgym.trainer.algorithms.objective import critic_loss, policy_loss
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from rollgym.trainer.algorithms.ratio import log_ratio, turn_mean
from tests.support.algorithm_cases import random_case


def gradient(function, at):
    leaf = at.clone().requires_grad_()
    function(leaf).sum().backward()
    return leaf.grad


def test_sequence_ratio_has_the_gradient_of_its_plain_form_where_the_advantage_is_constant():
    rows = random_case(1).rows()
    mask = rows.mask
    logprobs = torch.where(mask, rows.numbers["logprobs"], 0.0)
    old = torch.where(mask, rows.numbers["old"], 0.0)
    advantage = torch.linspace(-1, 1, len(mask))[:, None]
    lengths = mask.sum(dim=1, keepdim=True)

    def bounded(ratio):
        return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.95, 1.05))

    def by_token(leaf):
        ratio = log_ratio(leaf, old, mask, rows.turn_index, level="sequence").exp()
        return torch.where(mask, bounded(ratio), 0.0) / lengths

    def by_sequence(leaf):
        return bounded((((leaf - old) * mask).sum(dim=1, keepdim=True) / lengths).exp())

    torch.testing.assert_close(by_token(logprobs).sum(), by_sequence(logprobs).sum())
    torch.testing.assert_close(gradient(by_token, logprobs), gradient(by_sequence, logprobs))


def test_turn_ratio_is_the_sequence_ratio_of_rows_cut_by_turn():
    case = random_case(2)
    whole, cut = case.rows("trajectory"), case.rows("step")
    by_turn, by_row = (
        log_ratio(rows.numbers["logprobs"], rows.numbers["old"], rows.mask, rows.turn_index, level=level)
        for rows, level in ((whole, "turn"), (cut, "sequence"))
    )
    torch.testing.assert_close(by_turn[whole.mask], by_row[cut.mask])


def test_turn_mean_of_nothing():
    empty = torch.zeros(0, 3)
    assert turn_mean(empty, empty.bool(), empty.long()).shape == (0, 3)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_extreme_ratios_stay_finite(level):
    mask = torch.ones(1, 2, dtype=torch.bool)
    leaf = torch.tensor([[0.0, 0.0]], requires_grad=True)
    ratio = log_ratio(
        leaf, torch.full((1, 2), -1e6), mask, torch.zeros(1, 2, dtype=torch.int64), level=level
    ).exp()
    ratio.sum().backward()
    assert ratio.isfinite().all()
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_straight_through_keeps_the_value_and_takes_the_gradient_of_k2(estimator):
    logprobs, reference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.5, -0.5])
    value = kl_estimate(logprobs, reference, estimator, straight_through=True)
    torch.testing.assert_close(value, kl_estimate(logprobs, reference, estimator))
    through = gradient(lambda leaf: kl_estimate(leaf, reference, estimator, straight_through=True), logprobs)
    torch.testing.assert_close(through, gradient(lambda leaf: kl_estimate(leaf, reference, "k2"), logprobs))


def test_k3_of_an_outlier_is_bounded_and_has_a_finite_gradient():
    outlier, reference = torch.tensor([-200.0]), torch.tensor([0.0])
    assert kl_estimate(outlier, reference, "k3").item() == 10
    assert gradient(lambda leaf: kl_estimate(leaf, reference, "k3"), outlier).isfinite().all()


def test_correction_weights_carry_no_gradient():
    leaf = torch.zeros(1, 1, requires_grad=True)
    assert not importance_weights(leaf, leaf, torch.ones(1, 1, dtype=torch.bool)).requires_grad


def test_value_clip_takes_the_larger_error():
    values, old, returns = torch.tensor([2.0, 0.2]), torch.zeros(2), torch.tensor([2.0, 1.0])
    loss = value_surrogate(values, returns, old_values=old, clip=0.5)
    assert loss.loss.tolist() == pytest.approx([0.5 * 1.5**2, 0.5 * 0.8**2])
    assert loss.clipped.tolist() == [True, False]
    assert value_surrogate(values, returns).loss.tolist() == pytest.approx([0.0, 0.5 * 0.8**2])
    with pytest.raises(ValueError, match="start of the update"):
        value_surrogate(values, returns, clip=0.5)


def test_weighted_surrogate_lets_every_gradient_through():
    # PPO's clip would give the first token no gradient; a bounded weight does.
    logprobs = torch.tensor([-1.0, -1.0])
    grad = gradient(
        lambda leaf: (
            weighted_surrogate(
                leaf, torch.tensor([math.log(3.0), 0.0]), torch.ones(2), weight_low=0.0, weight_high=1.2
            ).loss
        ),
        logprobs,
    )
    assert grad.tolist() == pytest.approx([-1.2, -1.0])


def simple_inputs(seed=9):
    rows = random_case(seed).rows()
    advantages = torch.where(
        rows.mask, torch.randn(rows.mask.shape, generator=torch.Generator().manual_seed(0)), 0.0
    )
    return rows.inputs(advantages, torch.zeros(len(rows.mask))), Denominators.from_mask(rows.mask)


def test_dropped_tokens_stay_in_the_denominator():
    inputs, denominators = simple_inputs()
    inputs = replace(inputs, behaviour_logprobs=inputs.old_logprobs - 3.0)  # every weight is e^3
    settings = resolve_preset("grpo", {"correction": {"kind": "band"}, "minibatches": 2})
    half = inputs.mask & (torch.arange(len(inputs.mask)) % 2 == 0)[:, None]
    mixed = replace(
        inputs, behaviour_logprobs=torch.where(half, inputs.old_logprobs, inputs.behaviour_logprobs)
    )
    assert policy_loss(settings, inputs, denominators)[0].item() == 0
    kept_alone = policy_loss(settings, replace(mixed, mask=half), denominators)[0]
    torch.testing.assert_close(policy_loss(settings, mixed, denominators)[0], kept_alone)


def test_one_step_per_batch_needs_no_old_logprobs():
    inputs, denominators = simple_inputs()
    inputs = replace(inputs, logprobs=inputs.logprobs.clone().requires_grad_())
    settings = PRESETS["grpo"]
    explicit = policy_loss(settings, replace(inputs, old_logprobs=inputs.logprobs.detach()), denominators)
    implied = policy_loss(settings, replace(inputs, old_logprobs=None), denominators)
    assert explicit[0] == implied[0]
    assert implied[1]["policy/ratio"][0] == implied[1]["policy/ratio"][1]
    implied[0].backward()
    assert inputs.logprobs.grad[inputs.mask].any()


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        ({"minibatches": 2}, "old_logprobs"),
        ({"kl": {"coefficient": 0.1}}, "reference_logprobs"),
        ({"entropy_coefficient": 0.1}, "entropy"),
        ({"surrogate": {"kind": "weighted", "applies_to": "negative_scores"}}, "scores"),
    ],
)
def test_what_the_algorithm_reads_must_be_there(overrides, missing):
    inputs, denominators = simple_inputs()
    with pytest.raises(ValueError, match=f"'{missing}'"):
        policy_loss(resolve_preset("grpo", overrides), replace(inputs, **{missing: None}), denominators)


def test_critic_loss_without_a_critic_is_refused():
    empty = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="no critic"):
        critic_loss(PRESETS["grpo"], empty, empty, empty, empty.bool(), Denominators(0, 0))


def test_entropy_bonus_and_kl_penalty_pull_the_right_way():
    inputs, denominators = simple_inputs()
    plain = resolve_preset("grpo", {})
    entropy = inputs.entropy.clone().requires_grad_()
    policy_loss(
        resolve_preset("grpo", {"entropy_coefficient": 0.01}), replace(inputs, entropy=entropy), denominators
    )[0].backward()
    assert (entropy.grad[inputs.mask] < 0).all()

    flat = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    leaf = inputs.logprobs.clone().requires_grad_()
    penalised = resolve_preset("grpo", {"kl": {"coefficient": 1.0, "estimator": "k2"}})
    policy_loss(penalised, replace(flat, logprobs=leaf), denominators)[0].backward()
    away = inputs.logprobs > inputs.reference_logprobs
    assert (leaf.grad[inputs.mask] > 0).tolist() == away[inputs.mask].tolist()
    assert policy_loss(plain, flat, denominators)[0].item() == 0


def test_mismatch_metrics():
    old = torch.tensor([[0.0, 0.0, torch.nan]])
    behaviour = torch.tensor([[math.log(0.5), math.log(2.0), torch.nan]])
    mask = torch.tensor([[True, True, False]])
    metrics = mismatch_metrics(old, behaviour, mask)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.25)
    assert metrics["mismatch/weight_max"] == pytest.approx(2.0)
    assert metrics["mismatch/weight_ess"] == pytest.approx(2.5**2 / 4.25 / 2)
    assert metrics["mismatch/k1"] == pytest.approx(0.0)
    assert metrics["mismatch/k3"] == pytest.approx((2.0 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 2)
    assert mismatch_metrics(old, behaviour, torch.zeros_like(mask)) == {}
    same = mismatch_metrics(old, old, mask)
    assert same["mismatch/weight_ess"] == 1
    assert same["mismatch/k3"] == 0


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 8) / 4),
        ("seq-mean-token-sum", (1 + 2 + 3 + 8) / 2),
        ("seq-mean-token-sum-norm", (1 + 2 + 3 + 8) / (2 * 10)),
        ("seq-mean-token-mean", ((1 + 2 + 3) / 3 + 8) / 2),
    ],
)
def test_rows_of_one_sequence_weigh_as_one(mode, expected):
    """By hand: the first two rows are one trajectory of three tokens, the last is one of a single token."""
    values = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [8.0, float("nan")]])
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    lengths = torch.tensor([3, 3, 1])
    counts = Denominators.from_lengths([3, 1])
    assert aggregate(values, mask, mode, counts, 10, lengths).item() == pytest.approx(expected)
    shares = [share(mask[part], mode, counts, lengths[part]).item() for part in ([0], [1], [2])]
    assert sum(shares) == pytest.approx(1.0)
