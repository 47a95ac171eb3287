"""Numbers of defects that others' trackers report, on inputs of our own."""

import math
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from rollgym.trainer.algorithms.advantages import group_advantages
from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import LossInputs, TrajectoryBatch
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.objective import policy_loss
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.rewards import turn_rewards
from rollgym.trainer.core.errors import ConfigError

MASK = torch.tensor([[False, True, True, False], [False, True, True, True]])


def inputs_of(logprobs, **more):
    torch.manual_seed(4)
    old, reference = -torch.rand(2, 4) - 0.5, -torch.rand(2, 4) - 0.5
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=old,
        advantages=torch.tensor([[1.0] * 4, [-0.5] * 4]),
        mask=MASK,
        turn_index=torch.zeros(2, 4, dtype=torch.long),
        old_logprobs=old,
        reference_logprobs=reference,
        **more,
    )


COUNTS = Denominators.from_lengths([2, 3])


def test_every_member_of_a_group_is_in_its_mean():
    scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 7.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    found = group_advantages(scores, groups, baseline="mean", scale="none")
    assert found.tolist() == [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]


@pytest.mark.parametrize("lone", [1.0, 0.35, 0.4, 0.3])
def test_a_deviation_of_the_others_that_is_rounding_divides_nothing(lone):
    scores = torch.tensor([lone] + [0.95] * 7)
    found = group_advantages(
        scores, torch.zeros(8, dtype=torch.long), baseline="leave_one_out", scale="rest_std"
    )
    assert found[0] == pytest.approx(lone - 0.95, abs=1e-6)
    assert float(found.abs().max()) < 10.0


@pytest.mark.parametrize("preset", ["grpo", "gspo", "dapo"])
def test_what_is_no_number_behind_the_mask_reaches_neither_loss_nor_metrics(preset):
    settings = resolve_preset(preset, {"kl": {"coefficient": 0.1, "placement": "loss"}})
    clean = -torch.rand(2, 4) - 0.5
    results = []
    for filler in (0.0, math.nan, math.inf, -1e10):
        logprobs = torch.where(MASK, clean, filler).requires_grad_()
        given = inputs_of(logprobs)
        given = replace(
            given,
            reference_logprobs=torch.where(MASK, given.reference_logprobs, filler),
            behaviour_logprobs=torch.where(MASK, given.behaviour_logprobs, -filler),
        )
        loss, metrics = policy_loss(settings, given, COUNTS)
        loss.backward()
        results.append(
            (
                float(loss.detach()),
                logprobs.grad[MASK],
                {name: float(each[0]) for name, each in metrics.items()},
            )
        )
        assert not logprobs.grad[~MASK].any()
    for loss, gradient, metrics in results[1:]:
        assert loss == results[0][0]
        assert torch.equal(gradient, results[0][1])
        assert metrics == results[0][2]


def kl_gradient(preset, **kl):
    """The gradient that the KL term adds to each sampled token's log-probability, times the number of tokens."""
    grads = []
    for coefficient in (0.0, 1.0):
        torch.manual_seed(9)
        logprobs = (-torch.rand(2, 4) - 0.5).requires_grad_()
        more = {"kl": {"coefficient": coefficient, "placement": "loss", **kl}} if coefficient else {}
        settings = resolve_preset(preset, {"aggregation": {"mode": "token-mean"}, **more})
        loss, _ = policy_loss(settings, inputs_of(logprobs), COUNTS)
        loss.backward()
        grads.append(logprobs.grad[MASK])
    given = inputs_of(logprobs)
    ratio = (logprobs - given.old_logprobs).exp()[MASK].detach()
    distance = (logprobs - given.reference_logprobs)[MASK].detach()
    return (grads[1] - grads[0]) * 5, ratio, distance


@pytest.mark.parametrize("preset", ["grpo", "gspo"])
def test_k3_times_the_ratio_has_the_gradient_of_the_reverse_divergence(preset):
    found, ratio, distance = kl_gradient(preset, estimator="k3", unbiased=True)
    # r (exp(-l) - 1 + l) has the derivative r l: that of E[l] under the policy, with tokens of another one.
    torch.testing.assert_close(found, ratio * distance, atol=1e-5, rtol=1e-4)


def test_k3_alone_has_that_of_the_forward_divergence_and_straight_through_mends_it():
    found, _, distance = kl_gradient("grpo", estimator="k3")
    torch.testing.assert_close(found, 1 - (-distance).exp(), atol=1e-5, rtol=1e-4)
    found, _, distance = kl_gradient("grpo", estimator="k3", straight_through=True)
    torch.testing.assert_close(found, distance, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("estimator", ["k2", "abs"])
def test_estimates_that_the_ratio_does_not_mend_are_refused(estimator):
    logprobs = torch.tensor([-1.0])
    assert kl_estimate(logprobs, logprobs - 0.5, estimator) > 0
    with pytest.raises((ConfigError, ValidationError), match="has a gradient of no divergence"):
        resolve_preset("grpo", {"kl": {"coefficient": 0.1, "estimator": estimator, "unbiased": True}})


def test_an_episode_is_too_long_by_what_the_policy_sampled_alone():
    batch = TrajectoryBatch(
        groups=[0],
        rewards=[[0.0, 1.0]],
        format_penalties=[[0.0, 0.0]],
        valid=[[True, True]],
        anchors=[[None, None]],
        tokens=[[4, 5]],  # tools answered with any number between
    )
    overlong = {"overlong": {"max_tokens": 12, "buffer_tokens": 4, "penalty": 1.0}}
    assert turn_rewards(resolve_preset("grpo", {"reward": overlong}).reward, batch) == [[0.0, 0.75]]
