"""Numbers of other trainers' releases; `peers/algorithms/replay.py` compares thousands."""

from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import LossInputs, RowBatch, StepTokens, TrajectoryBatch
from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.objective import policy_loss
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from tests.support.algorithm_cases import greedy_batch

OLD = torch.tensor([[-0.5, -1.0, -0.2], [-0.7, -0.3, -2.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0] * 3, [-0.5] * 3], dtype=torch.float64)
MASK = torch.tensor([[True] * 3, [True, True, False]])


def inputs_of(now, old=OLD, advantages=ADVANTAGES, mask=MASK, **further):
    """Return what a loss reads of rows that are episodes of one turn, sampled by the old policy."""
    return LossInputs(
        logprobs=torch.tensor(now, dtype=torch.float64, requires_grad=True),
        behaviour_logprobs=old,
        advantages=advantages,
        mask=mask,
        turn_index=torch.zeros(mask.shape, dtype=torch.int64),
        old_logprobs=old,
        **further,
    )


def loss_and_gradient(settings, inputs, counts=None):
    loss, _ = policy_loss(settings, inputs, counts or Denominators.from_mask(inputs.mask))
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.item(), gradient.tolist()


def assert_loss(found, loss, gradient):
    assert found[0] == pytest.approx(loss, abs=1e-8)
    assert found[1] == [pytest.approx(line, abs=1e-8) for line in gradient]


def test_cpgd():
    # siiRL 0.2.0 compute_policy_loss_cpgd, clip_ratio_low 0.2, clip_ratio_high 0.28, token-mean.
    settings = AlgorithmSettings.model_validate({"surrogate": {"kind": "cpgd", "clip_high": 0.28}})
    inputs = inputs_of([[-0.1, -1.3, -0.2], [-0.1, -0.9, -1.9]])
    expected = [[0.0, -0.2, -0.2], [0.1, 0.0, 0.0]]
    # siiRL divides by the count and 1e-8.
    assert_loss(loss_and_gradient(settings, inputs), 0.2883136287056466 * (1 + 1e-8 / 5), expected)


def bypassing(**parts):
    """Return an algorithm whose ratios start at the policy that sampled, and that rejects by the current one."""
    reject = [{"measure": "k3", "high": 0.1, "policy": "current"}]
    return AlgorithmSettings.model_validate(
        {"proximal": "behaviour", "correction": {"kind": "reject", "reject": reject}, **parts}
    )


def weighted(level):
    surrogate = {"kind": "weighted", "weight_low": 0.0, "weight_high": 1.1}
    return bypassing(surrogate=surrogate, ratio={"level": level})


@pytest.mark.parametrize(
    ("settings", "loss", "gradient"),
    [
        # verl 0.9.1 bypass_mode: loss_type ppo_clip, then reinforce with rollout_is token and sequence, all with
        # rollout_is_threshold 1.1, rollout_rs token_k3 and its threshold 0.1, and the mask's own count of tokens.
        (bypassing(), -0.5691978277514731, [-0.2210341836151295, -0.1481636441363436, -0.2]),
        (weighted("token"), 0.3206127373772466, [-0.22, -0.1481636441363436, -0.2]),
        (weighted("sequence_sum"), 0.3111176861696331, [-0.1637461506155964] * 3),
    ],
    ids=["ppo_clip", "reinforce_token", "reinforce_sequence"],
)
def test_rejection_beside_ratios_from_the_policy_that_sampled(settings, loss, gradient):
    inputs = inputs_of([[-0.4, -1.3, -0.2], [-0.1, -0.9, -1.9]])
    step = StepTokens(
        trajectory=torch.arange(2),
        mask=MASK,
        turn_index=inputs.turn_index,
        advantages=ADVANTAGES,
        behaviour_logprobs=OLD,
        old_logprobs=OLD,
        current_logprobs=inputs.logprobs.detach(),
    )
    inputs = replace(inputs, weights=prepare_step(settings, step).weights)
    # Both tokens of the second row are too far.
    assert_loss(loss_and_gradient(settings, inputs), loss, [gradient, [0.0] * 3])


@pytest.mark.parametrize(
    "correction",
    [
        {"kind": "reject", "reject": [{"measure": "k3", "high": 0.1}]},
        {"kind": "truncate", "reject": [{"measure": "k3", "high": 0.1, "policy": "current"}]},
    ],
    ids=["of the old policy", "with weights"],
)
def test_what_is_left_to_correct_there_is_the_current_policy_alone(correction):
    with pytest.raises(ValueError, match="leaves nothing to correct"):
        AlgorithmSettings.model_validate({"proximal": "behaviour", "correction": correction})


def test_a_mean_over_the_tokens_of_a_group():
    # SkyRL 0.3.0 prompt_mean with the prompts' rows [0, 2) and [2, 3), eps_clip 0.2.
    settings = resolve_preset("grpo", {"aggregation": {"unit": "group"}, "minibatches": 2})
    old = torch.cat([OLD, torch.full((1, 3), -0.6, dtype=torch.float64)])
    mask = torch.tensor([[True] * 3, [True, False, False], [True, True, False]])
    inputs = inputs_of(
        [[-0.4, -1.1, -0.2], [-0.6, -0.4, -1.9], [-0.5, -0.6, -0.7]],
        old=old,
        advantages=torch.cat([ADVANTAGES, torch.full((1, 3), 2.0, dtype=torch.float64)]),
        mask=mask,
        lengths=torch.tensor([4, 4, 2]),
    )
    expected = [
        [-0.13814637064933777, -0.1131046786904335, -0.125],
        [0.06907318532466888, 0.0, 0.0],
        [-0.5525854825973511, -0.5, 0.0],
    ]
    # SkyRL takes the exponential in float32.
    loss, gradient = loss_and_gradient(settings, inputs, Denominators.from_lengths([4, 2]))
    assert loss == pytest.approx(-1.3597633466124535, abs=1e-6)
    assert gradient == [pytest.approx(line, abs=1e-6) for line in expected]


def test_returns_of_tokens_less_the_greedy_episode():
    # verl 0.9.1 compute_remax_outcome_advantage with rewards on turns and baseline 0.4.
    turns = [[0.5, 1.0], [0.25, 0.0], [0.0, 0.0]]
    batch = TrajectoryBatch(
        groups=[7, 7, 7],
        rewards=turns,
        format_penalties=[[0.0, 0.0]] * 3,
        valid=[[True, True]] * 3,
        anchors=[[None, None]] * 3,
        tokens=[[2, 1], [1, 0], [3, 0]],
        greedy=greedy_batch([7], [0.4]),
    )
    mask = torch.tensor([[True, True, False, True], [True] + [False] * 3, [True] * 3 + [False]])
    index = torch.tensor([[0, 0, 0, 1], [0] * 4, [0] * 4])
    settings = AlgorithmSettings.model_validate(
        {"advantage": {"kind": "token_return", "baseline": "greedy", "whiten": False}}
    )
    assert settings.needs_greedy
    found = compute_advantages(settings, batch, RowBatch(torch.arange(3), mask, index)).advantages
    expected = [[1.1, 1.1, 0.0, 0.6], [-0.15, 0.0, 0.0, 0.0], [-0.4, -0.4, -0.4, 0.0]]
    assert found.tolist() == [pytest.approx(line, abs=1e-6) for line in expected]
