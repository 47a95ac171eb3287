"""Each setting of the composition reaches the function that it belongs to."""

from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import RowBatch, TrajectoryBatch
from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.filter_settings import RewardSettings
from rollgym.trainer.algorithms.objective import critic_loss, policy_loss
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.rewards import turn_charges, turn_rewards
from tests.support.algorithm_cases import random_case

# Group 0: returns 1 (three turns) and 0 (one turn). Group 1: one episode of return 2.
BATCH = TrajectoryBatch(
    groups=[0, 0, 1],
    rewards=[[0.0, 0.0, 1.0], [0.0], [2.0]],
    format_penalties=[[0.0] * 3, [0.0], [0.0]],
    valid=[[True] * 3, [True], [True]],
    anchors=[["s", "t", "s"], ["s"], ["s"]],
    tokens=[[1] * 3, [1], [1]],
)
MASK = torch.tensor([[True, True, True], [True, False, False], [True, False, False]])
ROWS = RowBatch(torch.arange(3), MASK, torch.arange(3).expand(3, 3))


def advantages(preset, **advantage):
    return (
        compute_advantages(resolve_preset(preset, {"advantage": advantage}), BATCH, ROWS)
        .advantages[MASK]
        .tolist()
    )


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ({"scale": "none"}, [0.5, 0.5, 0.5, -0.5, 0]),
        ({"scale": "none", "unit": "step"}, [0.25, 0.25, 0.25, -0.75, 0]),
        ({"scale": "none", "singleton": "raw"}, [0.5, 0.5, 0.5, -0.5, 2]),
        ({"scale": "none", "turn_discount": 0.5}, [0.125, 0.125, 0.125, -0.125, 0]),
        ({"scale": "none", "baseline": "none"}, [1, 1, 1, 0, 2]),
        ({"scale": "none", "baseline": "leave_one_out"}, [1, 1, 1, -1, 0]),
        ({"epsilon": 0.5**0.5}, [0.5**1.5, 0.5**1.5, 0.5**1.5, -(0.5**1.5), 0]),
        ({"scale": "none", "clip": 0.1}, [0.1, 0.1, 0.1, -0.1, 0]),
        ({"kind": "turn", "scale": "none", "turn_discount": 0.5}, [-0.1875, 0.0625, 0.5625, -0.4375, 0]),
        (
            {"kind": "turn", "scale": "none", "turn_discount": 0.5, "singleton": "raw"},
            [-0.1875, 0.0625, 0.5625, -0.4375, 2],
        ),
    ],
)
def test_group_and_turn_settings(advantage, expected):
    assert advantages("grpo", **advantage) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        # Step returns of the anchor group "s": 0.25, 1 and 0, mean 5/12.
        ({}, [0.25 - 1 / 6, 0.25, 0.25 + 7 / 12, -0.75 - 5 / 12, 0]),
        ({"unit": "trajectory"}, [0.5 - 1 / 6, 0.5, 0.5 + 7 / 12, -0.5 - 5 / 12, 0]),
        ({"singleton": "raw"}, [0.25 - 1 / 6, 0.25, 0.25 + 7 / 12, -0.75 - 5 / 12, 2]),
        ({"step_weight": 0.0}, [0.25, 0.25, 0.25, -0.75, 0]),
        ({"step_weight": 0.0, "normalisation": "mean_std_norm"}, [0.5, 0.5, 0.5, -1.5, 0]),
        (
            {"step_weight": 0.0, "normalisation": "mean_std_norm", "epsilon": 0.5},
            [0.25, 0.25, 0.25, -0.75, 0],
        ),
        # All keys of the group in one anchor group: returns 0.25, 0.5, 1 and 0, mean 7/16.
        ({"similarity": 0.0}, [0.0625, 0.3125, 0.8125, -1.1875, 0]),
    ],
)
def test_gigpo_settings(advantage, expected):
    assert advantages("gigpo", turn_discount=0.5, **advantage) == pytest.approx(expected, abs=5e-6)


def test_reward_penalty_reaches_token_advantages():
    algorithm = resolve_preset(
        "ppo",
        {
            "advantage": {"whiten": False},
            "kl": {"coefficient": 0.5, "estimator": "k1", "placement": "reward"},
        },
    )
    rows = replace(
        ROWS,
        values=torch.zeros(3, 3),
        old_logprobs=torch.full((3, 3), -1.0),
        reference_logprobs=torch.full((3, 3), -1.5),
    )
    result = compute_advantages(algorithm, BATCH, rows)
    # Each token costs 0.5 * 0.5; what is left to pay counts at every token before.
    assert result.advantages[MASK].tolist() == pytest.approx([0.25, 0.5, 0.75, -0.25, 1.75])


def one_token(**numbers):
    rows = random_case(0, groups=1, members=1, turns=1, tokens=1).rows()
    inputs = rows.inputs(torch.where(rows.mask, numbers.pop("advantage", 1.0), 0.0))
    tensors = {name: torch.where(rows.mask, value, torch.nan) for name, value in numbers.items()}
    return replace(inputs, scores=torch.tensor([-1.0]), **tensors)


def loss_of(inputs, **overrides):
    settings = resolve_preset("grpo", {"minibatches": 2, **overrides})
    return policy_loss(settings, inputs, Denominators(1, 1))[0].item()


@pytest.mark.parametrize(
    ("overrides", "numbers", "expected"),
    [
        # Ratio 2 against old, 4 against behaviour.
        ({}, {}, -1.2),
        ({}, {"advantage": -1.0}, 2.0),
        ({"surrogate": {"clip_high": 0.5}}, {}, -1.5),
        ({"surrogate": {"clip_low": 0.1}}, {"old_logprobs": 0.0, "advantage": -1.0, "logprobs": -0.7}, 0.9),
        ({"surrogate": {"dual_clip": 1.5}}, {"advantage": -1.0}, 1.5),
        ({"proximal": "behaviour", "surrogate": {"clip_high": 9.0}}, {}, -4.0),
        ({"surrogate": {"clip_high": 9.0}, "ratio": {"clamp": 0.5}}, {}, -1.6487213),
        ({"correction": {"kind": "truncate", "cap": 1.5}}, {}, -1.8),
        ({"correction": {"kind": "truncate", "cap": None}}, {}, -2.4),
        ({"correction": {"kind": "band", "low": 0.5, "high": 1.5}}, {}, 0.0),
        ({"correction": {"kind": "band", "low": 2.5, "high": 3.0}}, {}, 0.0),
        ({"surrogate": {"kind": "weighted", "weight_high": 1.5}}, {}, 1.5),
        ({"surrogate": {"kind": "weighted", "weight_low": 3.0, "weight_high": 4.0}}, {}, 3.0),
        ({"kl": {"coefficient": 0.5, "estimator": "k2"}}, {}, -1.2 + 0.25),
        ({"entropy_coefficient": 0.5}, {}, -1.2 - 1.0),
        ({"aggregation": {"mode": "seq-mean-token-sum-norm", "horizon": 4}}, {}, -0.3),
    ],
)
def test_loss_settings(overrides, numbers, expected):
    log_two = 0.6931472
    numbers = {
        "logprobs": -1.0,
        "old_logprobs": -1.0 - log_two,
        "behaviour_logprobs": -1.0 - 2 * log_two,
        "reference_logprobs": -2.0,
        "entropy": 2.0,
        **numbers,
    }
    assert loss_of(one_token(**numbers), **overrides) == pytest.approx(expected, abs=1e-6)


def test_the_weight_of_negative_scores_leaves_the_others_alone():
    surrogate = {"kind": "weighted", "weight_high": 1.5, "applies_to": "negative_scores"}
    inputs = one_token(logprobs=-1.0, old_logprobs=-2.0)
    assert loss_of(inputs, surrogate=surrogate) == pytest.approx(1.5)
    assert loss_of(replace(inputs, scores=torch.tensor([1.0])), surrogate=surrogate) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("score", "threshold", "expected"),
    # TOPR on rewards of 0 and 1: a failed episode is a negative one.
    [(0.0, 0.0, 1.5), (0.01, 0.0, 1.0), (1.0, 0.5, 1.0), (0.5, 0.5, 1.5), (-1.0, -2.0, 1.0)],
)
def test_an_episode_is_negative_up_to_the_threshold(score, threshold, expected):
    surrogate = {
        "kind": "weighted",
        "weight_high": 1.5,
        "applies_to": "negative_scores",
        "score_threshold": threshold,
    }
    inputs = replace(one_token(logprobs=-1.0, old_logprobs=-2.0), scores=torch.tensor([score]))
    assert loss_of(inputs, surrogate=surrogate) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("advantage", "before", "after"),
    [
        # One episode of two turns, the second unreadable: 0.5 off, with discount 0.5.
        ({"kind": "turn", "baseline": "none", "scale": "none"}, [0.25, 0.5], [0.5, 0.5]),
        ({"kind": "group", "baseline": "none", "scale": "none"}, [0.25, 0.25], [0.0, 0.0]),
    ],
)
def test_a_penalty_is_charged_before_or_after_discounting(advantage, before, after):
    batch = TrajectoryBatch(
        groups=[0],
        rewards=[[0.0, 1.0]],
        format_penalties=[[0.0, 0.0]],
        valid=[[True, False]],
        anchors=[[None, None]],
        tokens=[[1, 1]],
    )
    mask = torch.tensor([[True, True]])
    rows = RowBatch(torch.tensor([0]), mask, torch.tensor([[0, 1]]))
    for place, expected in (("reward", before), ("return", after)):
        settings = resolve_preset(
            "grpo",
            {
                "advantage": {**advantage, "turn_discount": 0.5},
                "reward": {"invalid_action_penalty": 0.5, "penalty_in": place},
            },
        )
        result = compute_advantages(settings, batch, rows)
        assert result.advantages[mask].tolist() == pytest.approx(expected)
        assert result.scores.tolist() == [0.5], "what the episode scored does not hang on it"


def test_the_environments_own_penalty_is_charged_in_the_same_way():
    batch = replace(BATCH, format_penalties=[[-0.25 for _ in turns] for turns in BATCH.rewards])
    reward = RewardSettings(penalty_in="return", scale=2.0)
    assert turn_rewards(reward, batch) == [[2 * (value + 0.25) for value in turns] for turns in BATCH.rewards]
    assert turn_charges(reward, batch) == [[-0.5 for _ in turns] for turns in BATCH.rewards]


def test_returns_of_a_critic_have_no_place_for_charges():
    with pytest.raises(ValueError, match="penalty_in 'return' has no meaning for advantage 'gae'"):
        resolve_preset("ppo", {"reward": {"penalty_in": "return"}})


def own_rewards(batch):
    return [list(turns) for turns in batch.rewards]


def test_a_custom_advantage_reads_the_shaped_rewards():
    algorithm = resolve_preset(
        "grpo",
        {
            "advantage": {"kind": "custom", "function": f"{__name__}:own_rewards"},
            "reward": {"turn_high": 0.5, "scale": 2.0},
        },
    )
    result = compute_advantages(algorithm, BATCH, ROWS)
    shaped = [min(value, 0.5) * 2.0 for turns in BATCH.rewards for value in turns]
    assert result.advantages[MASK].tolist() == pytest.approx(shaped)


def clearing(batch):
    """An advantage that leaves nothing of what it was shown."""
    given = [list(turns) for turns in batch.rewards]
    for part in (batch.rewards, batch.groups, batch.tokens, batch.anchors):
        part.clear()
    return given


def test_what_a_custom_advantage_does_to_the_batch_reaches_nobody():
    plain, clears = (
        resolve_preset(
            "grpo",
            {"advantage": {"kind": "custom", "function": f"{__name__}:{function}", "whiten": True}},
        )
        for function in ("own_rewards", "clearing")
    )
    expected, found = (compute_advantages(algorithm, BATCH, ROWS) for algorithm in (plain, clears))
    assert torch.equal(found.advantages, expected.advantages)
    assert found.metrics == expected.metrics


@pytest.mark.parametrize(
    ("critic", "expected"),
    [
        ({}, 0.5 * 2.5**2),
        ({"value_clip": None}, 0.5 * 4),
        ({"value_clip": None, "coefficient": 0.5}, 0.25 * 4),
    ],
)
def test_critic_settings(critic, expected):
    settings = resolve_preset("ppo", {"critic": critic})
    mask = torch.tensor([[True]])
    values, old, returns = torch.tensor([[1.0]]), torch.tensor([[0.0]]), torch.tensor([[3.0]])
    assert critic_loss(settings, values, old, returns, mask, Denominators(1, 1))[0].item() == expected
