"""What must not change an update: order of rows, padding, micro-batches, shards, the cut into rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.aggregation import Denominators, means, merge
from rollgym.trainer.algorithms.credit import compute_advantages
from rollgym.trainer.algorithms.objective import critic_loss, policy_loss
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.core.kinds import kind_of
from tests.support.algorithm_cases import random_case

# Compositions that together reach every part of the loss.
ALGORITHMS = {
    **PRESETS,
    "gspo_off_policy": resolve_preset("gspo", {"proximal": "behaviour", "surrogate": {"clip_high": 0.1}}),
    "turn_ratio": resolve_preset("gigpo", {"ratio": {"level": "turn"}, "minibatches": 2}),
    "dual_clip": resolve_preset(
        "dr_grpo", {"aggregation": {"horizon": 64}, "surrogate": {"dual_clip": 3.0}, "epochs": 2}
    ),
    "weighted": resolve_preset(
        "grpo",
        {
            "surrogate": {"kind": "weighted", "applies_to": "negative_scores"},
            "aggregation": {"mode": "seq-mean-token-sum"},
            "kl": {"coefficient": 0.1, "estimator": "k2"},
            "proximal": "behaviour",
        },
    ),
    "decoupled": resolve_preset(
        "grpo",
        {
            "correction": {"kind": "truncate", "cap": 1.2},
            "kl": {"coefficient": 0.1, "estimator": "k3", "straight_through": True},
            "entropy_coefficient": 0.01,
            "minibatches": 2,
        },
    ),
    "icepop": resolve_preset("ppo", {"correction": {"kind": "band", "low": 0.8, "high": 1.2}}),
    "reinforce": resolve_preset(
        "grpo",
        {
            "surrogate": {"kind": "reinforce"},
            "advantage": {"kind": "turn"},
            "kl": {"coefficient": 0.1, "placement": "reward", "estimator": "k1"},
        },
    ),
    "rejection": resolve_preset(
        "grpo",
        {
            "correction": {
                "kind": "truncate",
                "level": "sequence",
                "normalise": True,
                "reject": [
                    {"level": "sequence", "measure": "k3", "statistic": "max", "high": 0.3},
                    {"level": "turn", "measure": "k1", "low": -0.4, "high": 0.4, "only_negative": True},
                    {"measure": "probability", "low": -0.3, "high": 0.3, "policy": "current"},
                ],
            },
            "aggregation": {"mode": "token-sum"},
            "minibatches": 2,
        },
    ),
    "geometric": resolve_preset(
        "grpo", {"correction": {"kind": "band", "level": "geometric", "low": 0.8, "high": 1.3}}
    ),
    "turn_weights": resolve_preset(
        "ppo",
        {"correction": {"kind": "truncate", "level": "turn", "floor": 0.9}, "critic": {"loss": "huber"}},
    ),
    "product": resolve_preset(
        "rloo",
        {
            "surrogate": {"kind": "ppo"},
            "ratio": {"level": "sequence_sum"},
            "aggregation": {"mode": "seq-mean-token-mean", "unit": "trajectory"},
            "minibatches": 2,
        },
    ),
    "bounded_logprobs": resolve_preset("grpo", {"surrogate": {"kind": "cpgd"}, "minibatches": 2}),
    "unbiased": resolve_preset(
        "grpo",
        {"kl": {"coefficient": 0.1, "unbiased": True}, "reward": {"normalise": "batch"}, "minibatches": 2},
    ),
    "charged_advantage": resolve_preset(
        "dr_grpo",
        {
            "aggregation": {"horizon": 64},
            "kl": {"coefficient": 0.1, "estimator": "k1", "placement": "advantage"},
            "surrogate": {"kind": "dppo", "two_sided": True, "low": 0.1, "high": 0.1},
            "minibatches": 2,
        },
    ),
    "charged_return": resolve_preset(
        "rloo",
        {
            "kl": {"coefficient": 0.1, "estimator": "k1", "placement": "return"},
            "correction": {
                "kind": "truncate",
                "reject": [
                    {"level": "sequence", "measure": "variation", "high": 0.2},
                    {"measure": "behaviour_kl", "high": 0.1},
                ],
            },
        },
    ),
    "greedy_returns": resolve_preset(
        "grpo",
        {
            "advantage": {"kind": "token_return", "baseline": "greedy", "whiten_form": "mean"},
            "kl": {"coefficient": 0.1, "straight_through": True, "gradient_cap": 1.1},
            "minibatches": 2,
        },
    ),
    "limited": resolve_preset(
        "reinforce_pp",
        {
            "kl": {"estimator": "k2", "limit": 0.02},
            "positive_nll": {"coefficient": 0.5, "score_threshold": 0.5},
        },
    ),
    "clipped_advantage": resolve_preset("reinforce_pp_baseline", {"advantage": {"clip": 1.0}}),
}
BY_NAME = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=5)


def test_each_kind_has_a_part_in_them():
    kinds = {
        "advantage": {kind_of(each) for each in ADVANTAGES}
        - {each.advantage.kind for each in ALGORITHMS.values()},
        "surrogate": {kind_of(each) for each in SURROGATES}
        - {each.surrogate.kind for each in ALGORITHMS.values()},
    }
    # A function of a user's is what it is.
    assert kinds == {"advantage": {"custom"}, "surrogate": {"custom"}}, (
        "compose an algorithm of it in ALGORITHMS"
    )


def advantages_of(algorithm, case, rows):
    return compute_advantages(algorithm, case.batch, rows.row_batch())


def losses(algorithm, rows, result, parts=None):
    """Return loss, metrics, and the gradients by log-probability and by value, taken part by part."""
    lengths = rows.lengths()
    first = [int((rows.trajectory == each).nonzero()[0]) for each in rows.trajectory.unique()]
    good = result.scores[first] > algorithm.positive_nll.score_threshold
    denominators = replace(
        Denominators.from_lengths(lengths[first].tolist()), positive_tokens=int(lengths[first][good].sum())
    )
    logprobs = rows.numbers["logprobs"].clone().requires_grad_()
    entropy = rows.numbers["entropy"].clone().requires_grad_()
    values = rows.numbers["values"].clone().add(0.3).requires_grad_()
    inputs = replace(
        rows.inputs(result.advantages, result.scores, algorithm=algorithm), logprobs=logprobs, entropy=entropy
    )
    total, metrics = 0.0, []
    for part in parts or [torch.arange(len(rows.mask))]:
        loss, numbers = policy_loss(algorithm, inputs.select(part), denominators)
        metrics.append(numbers)
        if algorithm.critic is not None:
            error, numbers = critic_loss(
                algorithm,
                values[part],
                rows.numbers["values"][part],
                result.returns[part],
                rows.mask[part],
                denominators,
                lengths[part],
            )
            loss = loss + error
            metrics.append(numbers)
        loss.backward()
        total += loss.item()
    # Not masked here: a NaN gradient outside the mask would reach the model's weights.
    gradients = [
        torch.zeros(rows.mask.shape) if leaf.grad is None else leaf.grad
        for leaf in (logprobs, entropy, values)
    ]
    assert not any(gradient[~rows.mask].any() for gradient in gradients)
    return total, means(merge(metrics)), gradients


def assert_same(left, right):
    assert left[0] == pytest.approx(right[0], rel=1e-4, abs=1e-6)
    assert left[1] == pytest.approx(right[1], rel=1e-4, abs=1e-5)
    torch.testing.assert_close(left[2], right[2], rtol=1e-4, atol=1e-6)


@BY_NAME
@FEW
@given(seed=SEEDS)
def test_micro_batches_add_up(algorithm, seed):
    case = random_case(seed)
    for layout in ("trajectory", "step"):
        rows = case.rows(layout)
        result = advantages_of(algorithm, case, rows)
        order = torch.randperm(len(rows.mask), generator=torch.Generator().manual_seed(seed))
        cut = seed % (len(order) - 1) + 1
        parts = [order[:cut], order[cut:]]
        assert_same(losses(algorithm, rows, result), losses(algorithm, rows, result, parts))


@BY_NAME
@FEW
@given(seed=SEEDS)
def test_data_parallel_shards_add_up(algorithm, seed):
    # Each shard sees its rows alone and narrower padding; an average over shards times their number is the sum.
    case = random_case(seed)
    rows = case.rows()
    result = advantages_of(algorithm, case, rows)
    whole = losses(algorithm, rows, result)
    inputs = rows.inputs(result.advantages, result.scores, algorithm=algorithm)
    denominators = Denominators.from_mask(rows.mask)
    shards = torch.arange(len(rows.mask)).chunk(3)
    average = sum(policy_loss(algorithm, inputs.select(shard), denominators)[0] for shard in shards) / len(
        shards
    )
    alone = policy_loss(algorithm, inputs, denominators)[0]
    torch.testing.assert_close(average * len(shards), alone, rtol=1e-4, atol=1e-6)
    assert_same(whole, losses(algorithm, rows, result, list(shards)))


@BY_NAME
@FEW
@given(seed=SEEDS)
def test_order_of_rows_does_not_matter(algorithm, seed):
    case = random_case(seed)
    for layout in ("trajectory", "step"):
        rows = case.rows(layout)
        order = torch.randperm(len(rows.mask), generator=torch.Generator().manual_seed(seed))
        result, shuffled = (advantages_of(algorithm, case, part) for part in (rows, rows.permuted(order)))
        torch.testing.assert_close(result.advantages[order], shuffled.advantages)
        plain = losses(algorithm, rows, result)
        moved = losses(algorithm, rows.permuted(order), shuffled)
        assert_same((*plain[:2], [gradient[order] for gradient in plain[2]]), moved)


@BY_NAME
@FEW
@given(seed=SEEDS, padding=st.integers(1, 9))
def test_padding_and_what_lies_outside_the_mask_do_not_matter(algorithm, seed, padding):
    case = random_case(seed)
    narrow, wide = case.rows(), case.rows(padding=padding, garbage=1e30)
    width = narrow.mask.shape[1]
    results = [advantages_of(algorithm, case, rows) for rows in (narrow, wide)]
    torch.testing.assert_close(results[0].advantages, results[1].advantages[:, :width])
    left, right = (
        losses(algorithm, rows, result) for rows, result in zip((narrow, wide), results, strict=True)
    )
    assert_same(left, (*right[:2], [gradient[:, :width] for gradient in right[2]]))


@BY_NAME
@FEW
@given(seed=SEEDS)
def test_rows_per_turn_get_the_advantages_of_rows_per_trajectory(algorithm, seed):
    case = random_case(seed)
    whole, cut = case.rows("trajectory"), case.rows("step")
    left, right = (advantages_of(algorithm, case, rows) for rows in (whole, cut))
    torch.testing.assert_close(left.advantages[whole.mask], right.advantages[cut.mask])
    assert left.metrics == pytest.approx(right.metrics)
    if left.returns is not None:
        torch.testing.assert_close(left.returns[whole.mask], right.returns[cut.mask])
        assert not left.returns[~whole.mask].any()


@BY_NAME
@FEW
@given(seed=SEEDS, cut=SEEDS)
def test_the_cut_of_an_episode_into_rows_does_not_matter(algorithm, seed, cut):
    # Rows of one episode lie in any micro-batch, in any order; a row per turn is one of the cuts.
    case = random_case(seed)
    whole = case.rows("trajectory")
    expected = losses(algorithm, whole, advantages_of(algorithm, case, whole))
    for layout in (cut, "step"):
        rows = case.rows(layout)
        order = torch.randperm(len(rows.mask), generator=torch.Generator().manual_seed(seed))
        parts = list(order.chunk(1 + seed % 4))
        loss, metrics, gradients = losses(algorithm, rows, advantages_of(algorithm, case, rows), parts)
        assert_same(
            (expected[0], expected[1], [gradient[whole.mask] for gradient in expected[2]]),
            (loss, metrics, [gradient[rows.mask] for gradient in gradients]),
        )


@BY_NAME
def test_empty_rows_and_nan_outside_the_mask_give_finite_gradients(algorithm):
    case = random_case(5)
    rows = case.rows()
    result = advantages_of(algorithm, case, rows)
    before = losses(algorithm, rows, result)
    empty = torch.zeros(2, rows.mask.shape[1])
    longer = replace(
        rows,
        trajectory=torch.cat([rows.trajectory, torch.zeros(2, dtype=torch.int64)]),
        mask=torch.cat([rows.mask, empty.bool()]),
        turn_index=torch.cat([rows.turn_index, empty.long() - 1]),
        numbers={name: torch.cat([part, empty + torch.nan]) for name, part in rows.numbers.items()},
    )
    after = losses(algorithm, longer, advantages_of(algorithm, case, longer))
    assert_same(before, (*after[:2], [gradient[:-2] for gradient in after[2]]))


@BY_NAME
def test_a_micro_batch_of_empty_rows_is_zero(algorithm):
    case = random_case(6)
    rows = case.rows()
    rows = replace(rows, mask=torch.zeros_like(rows.mask))
    loss, metrics = policy_loss(
        algorithm,
        rows.inputs(torch.zeros(rows.mask.shape), torch.zeros(len(rows.mask)), algorithm=algorithm),
        Denominators(7, 3),
    )
    assert loss.item() == 0
    assert means(metrics) == {}


def test_denominators_of_parts_add_up():
    rows = random_case(7).rows()
    half = len(rows.mask) // 2
    parts = Denominators.from_mask(rows.mask[:half]) + Denominators.from_mask(rows.mask[half:])
    assert parts == Denominators.from_mask(rows.mask)
