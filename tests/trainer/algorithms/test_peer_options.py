"""Options that reproduce other trainers' releases, held against numbers of these."""

import pytest
import torch

from rollgym.trainer.algorithms.advantages import group_advantages
from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import LossInputs, RowBatch, StepTokens, TrajectoryBatch
from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.kl import kl_estimate
from rollgym.trainer.algorithms.objective import policy_loss
from rollgym.trainer.algorithms.prepare import prepare_step
from rollgym.trainer.algorithms.rewards import turn_rewards
from rollgym.trainer.algorithms.settings import AlgorithmSettings

# Turns of the first episode end at the second and at the last column; the second one is a single token.
MASK = torch.tensor([[True, True, False, True], [True, False, False, False]])
TURNS = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])


def settings_of(**parts):
    return AlgorithmSettings.model_validate(parts)


def episodes(rewards, truncated=()):
    return TrajectoryBatch(
        groups=[5, 5],
        rewards=rewards,
        format_penalties=[[0.0] * len(turns) for turns in rewards],
        valid=[[True] * len(turns) for turns in rewards],
        anchors=[[None] * len(turns) for turns in rewards],
        tokens=[[2, 1], [1]],
        truncated=truncated,
    )


def token_advantages(settings, last_rewards, **rows):
    """Return the advantages of two episodes, each with one reward at its end."""
    first, second = last_rewards
    batch = episodes([[0.0, first], [second]])
    found = compute_advantages(settings, batch, RowBatch(torch.arange(2), MASK, TURNS, **rows))
    return found.advantages.tolist()


def assert_rows(found, expected, tolerance=1e-6):
    assert found == [pytest.approx(line, abs=tolerance) for line in expected]


@pytest.mark.parametrize(
    ("rejection", "loss", "gradient"),
    [
        # OpenRLHF 0.11.2 PolicyLoss(is_correction_level=, is_correction_gating=, is_correction_threshold=(0, high)).
        (
            {"level": "token", "measure": "variation", "high": 0.1},
            0.059543106824775885,
            [[0.0, -0.1481636441363436, 0.0], [0.11162780704588714, 0.09607894391523235, 0.0]],
        ),
        (
            {"level": "sequence", "measure": "variation", "high": 0.2},
            0.20770675096111946,
            [[0.0] * 3, [0.11162780704588714, 0.09607894391523235, 0.0]],
        ),
        (
            {"level": "token", "measure": "behaviour_kl", "high": 0.4},
            -0.03977395393350602,
            [
                [-0.09931706075828191, -0.1481636441363436, 0.0],
                [0.11162780704588714, 0.09607894391523235, 0.0],
            ],
        ),
        (
            {"level": "sequence", "measure": "behaviour_kl", "high": 0.1},
            0.20770675096111946,
            [[0.0] * 3, [0.11162780704588714, 0.09607894391523235, 0.0]],
        ),
    ],
    ids=["tv", "seq_tv", "binary_kl", "seq_binary_kl"],
)
def test_gates_of_the_mismatch(rejection, loss, gradient):
    old = torch.tensor([[-0.9, -1.0, -0.2], [-0.7, -0.3, -2.0]], dtype=torch.float64)
    behaviour = torch.tensor([[-0.2, -0.8, -0.9], [-0.71, -0.31, -2.0]], dtype=torch.float64)
    now = torch.tensor([[-0.9, -1.1, -0.25], [-0.6, -0.35, -1.9]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 3, [True, True, False]])
    advantages = torch.tensor([[1.0] * 3, [-0.5] * 3], dtype=torch.float64)
    turn = torch.zeros(mask.shape, dtype=torch.int64)
    settings = settings_of(correction={"kind": "truncate", "cap": None, "reject": [rejection]}, minibatches=2)
    step = StepTokens(
        trajectory=torch.arange(2),
        mask=mask,
        turn_index=turn,
        advantages=advantages,
        behaviour_logprobs=behaviour,
        old_logprobs=old,
        current_logprobs=now.detach(),
    )
    inputs = LossInputs(
        logprobs=now,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        mask=mask,
        turn_index=turn,
        old_logprobs=old,
        weights=prepare_step(settings, step).weights,
    )
    found, _ = policy_loss(settings, inputs, Denominators.from_mask(mask))
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-8)
    assert_rows(now.grad.tolist(), gradient, 1e-8)


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        ("k1", [0.1, -0.1, -0.05, 0.3, -0.05, 1.5]),
        ("k2", [0.005, 0.005, 0.00125, 0.045, 0.00125, 1.125]),
        ("k3", [0.0048374236, 0.0051709409, 0.0012710841, 0.0408182107, 0.0012710989, 0.7231302261]),
    ],
)
def test_gradient_of_a_divergence_from_what_another_policy_sampled(estimator, values):
    # OpenRLHF 0.11.2 compute_approx_kl(unbiased_gradient=True) with log_probs_old; the last ratio is e^3.5, kept at 10.
    logprobs = torch.tensor([-0.4, -1.1, -0.25, -0.6, -0.35, -0.5], requires_grad=True)
    reference = torch.tensor([-0.5, -1.0, -0.2, -0.9, -0.3, -2.0])
    old = torch.tensor([-0.5, -1.3, -0.2, -0.7, -0.3, -4.0])
    found = kl_estimate(
        logprobs,
        reference,
        estimator,
        straight_through=True,
        log_ratio=logprobs - old,
        gradient_cap=10.0,
        limit=10.0,
    )
    found.sum().backward()
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    slopes = [0.1105170920, -0.1221402958, -0.0475614704, 0.3315511942, -0.0475614555, 15.0]
    assert logprobs.grad.tolist() == pytest.approx(slopes, abs=1e-5)


def test_the_loss_takes_that_gradient():
    kl = {"coefficient": 0.5, "estimator": "k1", "straight_through": True, "gradient_cap": 1.5}
    logprobs = torch.tensor([[-0.4, -0.5]], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=torch.tensor([[-0.5, -4.0]]),
        advantages=torch.zeros(1, 2),
        mask=torch.ones(1, 2, dtype=torch.bool),
        turn_index=torch.zeros(1, 2, dtype=torch.int64),
        old_logprobs=torch.tensor([[-0.5, -4.0]]),
        reference_logprobs=torch.tensor([[-0.5, -2.0]]),
    )
    loss, _ = policy_loss(settings_of(kl=kl, minibatches=2), inputs, Denominators(2, 1))
    loss.backward()
    # 0.5 / 2 tokens times d, times the ratio e^0.1, and at most 1.5.
    assert loss.item() == pytest.approx(0.25 * (0.1 + 1.5))
    assert logprobs.grad.tolist() == [pytest.approx([0.25 * 0.1 * 1.1051709, 0.25 * 1.5 * 1.5])]


def test_kl_beside_a_group_baseline_is_charged_at_its_token():
    # OpenRLHF 0.11.2, estimator rloo, kl_coef 0.1, with these differences of log-probabilities.
    difference = torch.tensor([[0.1, -0.2, 0.7, 0.3], [0.5, 0.1, 0.1, 0.1]])
    settings = settings_of(
        advantage={"kind": "group", "baseline": "leave_one_out", "scale": "none"},
        kl={"coefficient": 0.1, "estimator": "k1", "placement": "return"},
    )
    found = token_advantages(
        settings, (1.0, 0.0), old_logprobs=difference - 1.0, reference_logprobs=torch.full((2, 4), -1.0)
    )
    assert_rows(found, [[0.98, 0.99, 0.0, 0.97], [-1.05, 0.0, 0.0, 0.0]])


def test_whitening_may_take_the_mean_off_alone():
    # OpenRLHF 0.11.2, estimator reinforce_baseline with no_std_norm.
    advantage = {"kind": "group", "scale": "none", "whiten": True, "whiten_form": "mean"}
    found = token_advantages(settings_of(advantage=advantage), (1.0, 0.0))
    assert_rows(found, [[0.25, 0.25, 0.0, 0.25], [-0.75, 0.0, 0.0, 0.0]])


def test_returns_may_be_discounted_by_observations():
    # OpenRLHF 0.11.2, estimator reinforce with gamma 0.5 and no_std_norm.
    advantage = {"kind": "token_return", "gamma": 0.5, "return_mask": "none", "whiten_form": "mean"}
    found = token_advantages(settings_of(advantage=advantage), (1.0, 0.25))
    assert_rows(found, [[-0.28125, -0.15625, 0.0, 0.59375], [-0.15625, 0.0, 0.0, 0.0]])


def test_a_shifted_baseline():
    # Trinity-RFT 0.6.0 ASYMREGroupAdvantage(baseline_shift=-0.1); it keeps the score of a group of one.
    scores, groups = torch.tensor([1.0, 0.0, 0.0, 2.0]), torch.tensor([0, 0, 0, 1])
    found = group_advantages(scores, groups, scale="none", singleton="raw", shift=-0.1)
    assert found.tolist() == pytest.approx([0.7666666508, -0.2333333492, -0.2333333492, 2.0])
    advantage = {"kind": "group", "scale": "none", "baseline_shift": -0.1}
    rows = token_advantages(settings_of(advantage=advantage), (1.0, 0.0))
    assert_rows(rows, [[0.6, 0.6, 0.0, 0.6], [-0.4, 0.0, 0.0, 0.0]])


def test_what_was_cut_off_may_earn_a_fixed_reward():
    # OpenRLHF 0.11.2 apply_stop_properly_penalty with a coefficient of -0.5.
    settings = RewardSettings(truncated_reward=-0.5, scale=2.0)
    assert turn_rewards(settings, episodes([[1.0, 0.5], [1.0]], [True, False])) == [[0.0, -0.5], [2.0]]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"kl": {"coefficient": 0.1, "gradient_cap": 2.0}}, "read with kl.straight_through only"),
        (
            {"advantage": {"kind": "token_return"}, "kl": {"coefficient": 0.1, "placement": "return"}},
            "credits each token with what follows",
        ),
        ({"reward": {"truncated_reward": 0.0, "truncated_scale": 0.5}}, "choose one"),
        (
            {"advantage": {"kind": "group", "whiten": True, "whiten_form": "mean", "whiten_epsilon": 1e-5}},
            "whiten_epsilon: whiten_form 'mean' divides by nothing",
        ),
        (
            {"advantage": {"kind": "token_return", "whiten_form": "mean", "whiten_unbiased": False}},
            "whiten_unbiased: whiten_form 'mean' divides by nothing",
        ),
        (
            {"advantage": {"kind": "group", "baseline_shift": -0.1, "whiten": True}},
            "and a baseline_shift with it",
        ),
        (
            {"advantage": {"kind": "group", "baseline": "greedy"}, "reward": {"normalise": "batch"}},
            "and not those of the greedy episode",
        ),
        (
            {"advantage": {"kind": "token_return", "baseline": "greedy"}, "reward": {"normalise": "running"}},
            "and not those of the greedy episode",
        ),
        (
            {"advantage": {"kind": "gdpo"}, "kl": {"coefficient": 0.1, "placement": "reward"}},
            "a KL penalty is none of them",
        ),
        (
            {"advantage": {"kind": "gdpo"}, "reward": {"truncated_reward": -1.0}},
            "reward.truncated_reward changes the sum of rewards",
        ),
        (
            {"advantage": {"kind": "gdpo"}, "reward": {"scale": 2.0}},
            "reward.scale changes the sum of rewards.*: leave it out and say it with algorithm.advantage.weights",
        ),
        (
            {"advantage": {"kind": "gdpo", "weights": {"a": 2.0}}, "reward": {"scale": 2.0}},
            "reward.scale changes the sum of rewards",
        ),
        *(
            (
                {"correction": {"kind": "reject", "reject": [{"measure": measure, "high": -0.1}]}},
                f"'{measure}' is never below 0, so that high -0.1 would reject everything",
            )
            for measure in ("ratio", "k2", "k3", "variation", "binary_kl", "behaviour_kl")
        ),
        (
            {"surrogate": {"kind": "weighted", "score_threshold": 0.5}},
            "read with applies_to: negative_scores only",
        ),
        ({"filter": {"kind": "top_p", "shares": "softmax", "slack": 0.1}}, "read with shares: linear only"),
    ],
)
def test_what_says_nothing_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**parts)


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("gdpo", "reward"),
        *((kind, "return") for kind in ("gae", "bi_level_gae", "token_return", "optimal_token")),
    ],
)
def test_a_penalty_of_weight_0_may_stand_anywhere(kind, placement):
    critic = {"critic": {}} if kind in ("gae", "bi_level_gae") else {}
    advantage, penalty = {"kind": kind}, {"placement": placement}
    assert settings_of(advantage=advantage, kl=penalty, **critic).kl.placement == placement
    with pytest.raises(ValueError, match=r"KL penalty|set kl\.placement"):
        settings_of(advantage=advantage, kl=penalty | {"coefficient": 0.1}, **critic)
