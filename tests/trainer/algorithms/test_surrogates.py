"""Each surrogate against its paper's formula, token by token in plain Python: values and gradients."""

import math
from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators, aggregate
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.losses import (
    dppo_surrogate,
    ppo_surrogate,
    quadratic_surrogate,
    sapo_surrogate,
    value_surrogate,
    vespo_surrogate,
    weighted_surrogate,
)
from rollgym.trainer.algorithms.objective import policy_loss
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.ratio import Clip, log_ratio
from rollgym.trainer.core.errors import PluginError
from tests.support.algorithm_cases import random_case

LOGPROBS = [-0.1, -1.2, -0.7, -2.0, -0.4, -1.0]
OLD = [-0.6, -1.1, -0.2, -2.5, -0.4, -3.0]
ADVANTAGES = [1.5, -0.5, 0.8, -1.2, 0.0, -2.0]


def with_gradient(function, at=LOGPROBS):
    leaf = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    loss = function(
        leaf, torch.tensor(OLD, dtype=torch.float64), torch.tensor(ADVANTAGES, dtype=torch.float64)
    )
    loss.sum().backward()
    return loss.tolist(), leaf.grad.tolist()


def check(function, value, slope):
    """Compare with formulas of (lp, old, A) for one token's loss and its derivative by lp."""
    losses, gradients = with_gradient(function)
    places = list(zip(LOGPROBS, OLD, ADVANTAGES, strict=True))
    assert losses == pytest.approx([value(*each) for each in places], abs=1e-9)
    assert gradients == pytest.approx([slope(*each) for each in places], abs=1e-9)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_sapo():
    # arXiv:2511.20347, equations 5 and 6: f(r) = sigmoid(tau (r - 1)) 4 / tau, f'(r) = 4 p (1 - p).
    def tau(advantage):
        return 1.0 if advantage > 0 else 1.05

    def gate(lp, old, advantage):
        return sigmoid(tau(advantage) * (math.exp(lp - old) - 1))

    check(
        lambda lp, old, a: sapo_surrogate(lp - old, a).loss,
        lambda lp, old, a: -a * gate(lp, old, a) * 4 / tau(a),
        lambda lp, old, a: -a * 4 * gate(lp, old, a) * (1 - gate(lp, old, a)) * math.exp(lp - old),
    )


def test_quadratic():
    # Kimi 1.5, arXiv:2501.12599, equation 3, per token as in ROLL; verl's dro.
    check(
        lambda lp, old, a: quadratic_surrogate(lp, old, a, coefficient=0.3).loss,
        lambda lp, old, a: -a * lp + 0.15 * (lp - old) ** 2,
        lambda lp, old, a: -a + 0.3 * (lp - old),
    )


def left_by_tv(lp, old, advantage):
    moved = math.exp(lp) - math.exp(old)
    return moved > 0.2 if advantage > 0 else moved < -0.2


def left_by_kl(lp, old, advantage):
    p, q = math.exp(lp), math.exp(old)
    distance = q * (old - lp) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
    return distance > 0.05 and (p > q if advantage > 0 else p < q)


@pytest.mark.parametrize(("divergence", "left"), [("tv", left_by_tv), ("kl", left_by_kl)])
def test_dppo(divergence, left):
    # arXiv:2602.04879; verl dppo_tv and dppo_kl with cap 20.
    bound = 0.2 if divergence == "tv" else 0.05
    assert [left(*each) for each in zip(LOGPROBS, OLD, ADVANTAGES, strict=True)].count(True) >= 1
    check(
        lambda lp, old, a: dppo_surrogate(lp, old, a, divergence=divergence, low=bound, high=bound).loss,
        lambda lp, old, a: 0.0 if left(lp, old, a) else -a * min(math.exp(lp - old), 20) * lp,
        lambda lp, old, a: 0.0 if left(lp, old, a) else -a * min(math.exp(lp - old), 20),
    )


def test_dppo_as_prime_rl_has_it():
    # prime-rl default loss: -keep A r + kl_tau (lp - old)^2
    check(
        lambda lp, old, a: dppo_surrogate(lp, old, a, cap=None, penalty=1e-3, form="ratio").loss,
        lambda lp, old, a: (
            (0.0 if left_by_tv(lp, old, a) else -a * math.exp(lp - old)) + 1e-3 * (lp - old) ** 2
        ),
        lambda lp, old, a: (0.0 if left_by_tv(lp, old, a) else -a * math.exp(lp - old)) + 2e-3 * (lp - old),
    )


def test_weights_outside_their_bounds_can_be_dropped():
    # slime's DIS: tokens whose ratio leaves the band have no gradient.
    def weight(lp, old):
        ratio = math.exp(lp - old)
        return ratio if 0.5 <= ratio <= 1.5 else 0.0

    check(
        lambda lp, old, a: (
            weighted_surrogate(lp, lp - old, a, weight_low=0.5, weight_high=1.5, outside="drop").loss
        ),
        lambda lp, old, a: -weight(lp, old) * a * lp,
        lambda lp, old, a: -weight(lp, old) * a,
    )


def test_ppo_without_bounds_is_the_weighted_policy_gradient():
    check(
        lambda lp, old, a: ppo_surrogate(lp - old, a, clip_low=None, clip_high=None).loss,
        lambda lp, old, a: -a * math.exp(lp - old),
        lambda lp, old, a: -a * math.exp(lp - old),
    )


MASK = torch.tensor([[True, True, False, True], [True, False, True, True]])


def rows(values):
    return torch.tensor(values, dtype=torch.float64).view(2, 4)


EIGHT = [-0.3, -0.9, 7.0, -0.2, -1.5, 7.0, -0.6, -0.8]
EIGHT_OLD = [-0.9, -0.8, 7.0, -0.7, -1.0, 7.0, -0.7, -0.1]


def by_row(advantages, bounded, scale=1.0):
    """GMPO of a row: -A exp(mean of bounded log ratios), with its gradient by each log-probability."""
    lp, old = rows(EIGHT), rows(EIGHT_OLD)
    value, gradient = 0.0, torch.zeros(2, 4, dtype=torch.float64)
    for row in range(2):
        places = [place for place in range(4) if MASK[row, place]]
        moved = {place: float(lp[row, place] - old[row, place]) for place in places}
        kept = {place: bounded(moved[place], advantages[row]) for place in places}
        ratio = math.exp(sum(kept.values()) / len(places))
        value += -advantages[row] * ratio / 2
        for place in places:
            if kept[place] == moved[place]:
                gradient[row, place] = -advantages[row] * ratio / len(places) / 2
    return value, gradient


@pytest.mark.parametrize("advantages", [(1.0, -1.0), (-0.7, 2.0)])
def test_gmpo(advantages):
    # arXiv:2507.20673, equation 4; verl geo_mean.
    def bounded(moved, advantage):
        return min(moved, 0.4) if advantage > 0 else max(moved, -0.4)

    leaf = rows(EIGHT).requires_grad_()
    table = torch.tensor(advantages, dtype=torch.float64)[:, None].expand(2, 4)
    ratio = log_ratio(
        leaf, rows(EIGHT_OLD), MASK, torch.zeros(2, 4).long(), level="sequence", clip=Clip(table, 0.4, 0.4)
    )
    loss = aggregate(-table * ratio.exp(), MASK, "seq-mean-token-mean", Denominators.from_mask(MASK))
    loss.backward()
    value, gradient = by_row(advantages, bounded)
    assert loss.item() == pytest.approx(value, abs=1e-9)
    torch.testing.assert_close(leaf.grad, gradient, atol=1e-9, rtol=0)


def test_the_product_of_ratios_has_its_plain_value_and_gradient():
    # TRL's RLOO: the ratio of a completion is exp(sum lp - sum old), the loss a mean over completions.
    advantages = torch.tensor([1.3, -0.4], dtype=torch.float64)[:, None]
    leaf = rows(EIGHT).requires_grad_()
    ratio = log_ratio(leaf, rows(EIGHT_OLD), MASK, torch.zeros(2, 4).long(), level="sequence_sum")
    losses = ppo_surrogate(ratio, advantages.expand(2, 4), clip_low=0.3, clip_high=0.9).loss
    aggregate(losses, MASK, "seq-mean-token-mean", Denominators.from_mask(MASK)).backward()
    plain = rows(EIGHT).requires_grad_()
    product = torch.where(MASK, plain - rows(EIGHT_OLD), 0.0).sum(dim=1, keepdim=True)
    expected = ppo_surrogate(product, advantages, clip_low=0.3, clip_high=0.9).loss.mean()
    expected.backward()
    torch.testing.assert_close(leaf.grad, plain.grad, atol=1e-9, rtol=0)


def test_vespo():
    # TRL get_gamma_weights: phi = exp(lambda + k log w - lambda w) with the ratio w of the whole completion.
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)[:, None].expand(2, 4)
    leaf = rows(EIGHT).requires_grad_()
    ratio = log_ratio(leaf, rows(EIGHT_OLD), MASK, torch.zeros(2, 4).long(), level="sequence_sum")
    loss = torch.where(MASK, vespo_surrogate(leaf, ratio, advantages).loss, 0.0)
    loss.sum().backward()
    for row, (k, rate, advantage) in enumerate([(2.0, 3.0, 1.0), (3.0, 2.0, -1.0)]):
        log_w = sum(
            EIGHT[4 * row + place] - EIGHT_OLD[4 * row + place] for place in range(4) if MASK[row, place]
        )
        kernel = math.exp(rate + k * log_w - rate * math.exp(log_w))
        for place in range(4):
            expected = -kernel * advantage if MASK[row, place] else 0.0
            assert leaf.grad[row, place].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("estimator", "value", "slope"), [("abs", 0.5, -1.0), ("k1", -0.5, 1.0)])
def test_absolute_difference(estimator, value, slope):
    leaf = torch.tensor([-2.0], requires_grad=True)
    divergence = kl_estimate(leaf, torch.tensor([-1.5]), estimator)
    divergence.sum().backward()
    assert (divergence.item(), leaf.grad.item()) == pytest.approx((value, slope))


def test_unbiased_kl_is_the_ratio_times_the_estimate():
    # DeepSeek-V3.2, section 3.1: the gradient goes through ratio and estimate.
    lp, old, reference = -0.5, -0.9, -1.1
    leaf = torch.tensor([lp], dtype=torch.float64, requires_grad=True)
    divergence = kl_estimate(leaf, torch.tensor([reference], dtype=torch.float64), "k3", log_ratio=leaf - old)
    divergence.sum().backward()
    ratio, d = math.exp(lp - old), lp - reference
    k3 = math.exp(-d) - 1 + d
    assert divergence.item() == pytest.approx(ratio * k3, abs=1e-9)
    assert leaf.grad.item() == pytest.approx(ratio * k3 + ratio * (1 - math.exp(-d)), abs=1e-9)


@pytest.mark.parametrize(("value", "loss", "slope"), [(3.0, 4.5, 3.0), (30.0, 10 * (30 - 5), 10.0)])
def test_huber_loss_of_the_critic(value, loss, slope):
    # AReaL _huber_loss with delta 10
    leaf = torch.tensor([value], requires_grad=True)
    result = value_surrogate(leaf, torch.zeros(1), huber_delta=10.0).loss
    result.sum().backward()
    assert (result.item(), leaf.grad.item()) == pytest.approx((loss, slope))


def minus_log_sigmoid(inputs):
    """A surrogate of a user's: bounded for good tokens."""
    return -torch.nn.functional.logsigmoid(inputs.advantages * inputs.logprobs)


def one_number(inputs):
    """What is no loss for each token."""
    return inputs.logprobs.sum()


def custom(function):
    path = f"{__name__}:{function}"
    settings = resolve_preset("grpo", {"surrogate": {"kind": "custom", "function": path}})
    batch = random_case(3).rows()
    advantages = torch.where(batch.mask, 0.5, 0.0)
    inputs = batch.inputs(advantages, torch.zeros(len(batch.mask)), algorithm=settings)
    # As in an update, where a model has computed them.
    inputs = replace(inputs, logprobs=inputs.logprobs.detach().requires_grad_() * 1.0)
    return inputs, policy_loss(settings, inputs, Denominators.from_mask(batch.mask))[0]


def test_a_surrogate_of_the_users():
    inputs, loss = custom("minus_log_sigmoid")
    tokens = -torch.nn.functional.logsigmoid(0.5 * inputs.logprobs[inputs.mask])
    lengths = inputs.mask.sum(dim=1, keepdim=True).expand(inputs.mask.shape)[inputs.mask]
    assert loss.item() == pytest.approx((tokens / lengths).sum().item() / len(inputs.mask), abs=1e-6)


def test_a_surrogate_of_the_users_must_return_a_loss_for_each_token():
    with pytest.raises(PluginError, match=r"algorithm\.surrogate\.function.*loss of each token"):
        custom("one_number")


def without_gradient(inputs):
    """A surrogate that no weight can be learnt from."""
    return -(inputs.advantages * inputs.logprobs).detach()


def widened(inputs):
    """A surrogate that takes other tokens for sampled ones, for whoever reads the mask after it."""
    inputs.mask.fill_(value=True)
    return -inputs.advantages * inputs.logprobs


def clamped(inputs):
    """A surrogate that changes what others read, and what its own gradient needs."""
    return -inputs.advantages.clamp_(max=1.0) * inputs.logprobs.clamp_(min=-5.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("without_gradient", "must return a loss with a gradient"),
        ("widened", "has changed mask in place"),
        ("clamped", "has changed logprobs, advantages in place"),
    ],
)
def test_a_surrogate_of_the_users_that_breaks_the_loss_is_named(function, message):
    with pytest.raises(
        PluginError, match=rf"algorithm\.surrogate\.function '{__name__}:{function}' {message}.*line \d+\)"
    ):
        custom(function)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"surrogate": {"kind": "gmpo"}}, "set ratio.level to 'sequence'"),
        ({"surrogate": {"kind": "vespo"}}, "set ratio.level to 'sequence_sum'"),
        ({"surrogate": {"kind": "dppo"}, "ratio": {"level": "turn"}}, "about single tokens"),
        ({"surrogate": {"kind": "sapo", "tau_positive": float("nan")}}, "finite"),
        ({"surrogate": {"kind": "sapo", "tau_positve": 1.0}}, "did you mean 'tau_positive'"),
        ({"kl": {"coefficient": 0.1, "unbiased": True, "placement": "reward"}}, "no gradient"),
        ({"kl": {"target": 0.1}}, "set kl.coefficient above 0"),
        (
            {"proximal": "interpolated", "selection": {"kind": "second_moment"}},
            "set proximal to 'recomputed'",
        ),
        ({"aggregation": {"mode": "token-sum", "unit": "row"}}, "unit does nothing"),
        ({"correction": {"kind": "reject", "reject": []}}, "at least 1"),
        ({"correction": {"kind": "reject", "reject": [{"measure": "k3"}]}}, "needs a bound"),
        ({"correction": "icepopp"}, "did you mean 'icepop'"),
        ({"advantage": {"whiten_epsilon": 1e-5}}, "read with whiten: true only"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        resolve_preset("grpo", overrides)


@pytest.mark.parametrize("word", [False, "off", {"kind": False}, {"kind": "off"}])
def test_a_correction_is_turned_off_as_yaml_reads_the_word(word):
    assert resolve_preset("decoupled_ppo", {"correction": word}).correction.kind == "off"
