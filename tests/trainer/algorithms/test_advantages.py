import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.algorithms.advantages import generalized_advantages, group_advantages, whitened
from rollgym.trainer.algorithms.batch import RowBatch, TrajectoryBatch
from rollgym.trainer.algorithms.credit import compute_advantages, select_groups
from rollgym.trainer.algorithms.presets import PRESETS, resolve_preset
from rollgym.trainer.core.errors import PluginError
from tests.support.algorithm_cases import random_case

SCORES = st.lists(st.floats(-10, 10), min_size=2, max_size=8)


def textbook_gae(rewards, values, discount, trace):
    """Return the definition, as a double sum: sum over k of (discount * trace)^k * error of token t + k."""
    following = [*values[1:], 0.0][: len(values)]
    errors = [r + discount * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [
        sum((discount * trace) ** (later - place) * errors[later] for later in range(place, len(errors)))
        for place in range(len(errors))
    ]


@given(
    data=st.lists(
        st.tuples(st.floats(-1, 1), st.floats(-1, 1), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    discount=st.floats(0, 1),
    trace=st.floats(0, 1),
)
def test_gae_is_plain_gae_of_the_sampled_tokens(data, discount, trace):
    rewards, values, mask = (torch.tensor([list(part)]) for part in zip(*data, strict=True))
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=discount, gae_lambda=trace)
    expected = textbook_gae(rewards[mask].tolist(), values[mask].tolist(), discount, trace)
    assert advantages[mask].tolist() == pytest.approx(expected, abs=1e-6)
    assert returns[mask].tolist() == pytest.approx((advantages[mask] + values[mask]).tolist())
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def test_gae_runs_across_the_rows_of_a_trajectory():
    algorithm = resolve_preset("ppo", {"advantage": {"whiten": False, "gae_lambda": 0.9, "gamma": 0.8}})
    case = random_case(11, groups=1, members=3)
    rows = case.rows("step")
    result = compute_advantages(algorithm, case.batch, rows.row_batch())
    for trajectory, turns in enumerate(case.tokens):
        rewards, values = [], []
        for turn, reward in zip(turns, case.batch.rewards[trajectory], strict=True):
            values += turn["values"]
            rewards += [0.0] * (len(turn["values"]) - 1) + [reward]
        mine = rows.trajectory == trajectory
        computed = result.advantages[mine][rows.mask[mine]].tolist()
        assert computed == pytest.approx(textbook_gae(rewards, values, 0.8, 0.9), abs=1e-5)


@given(scores=SCORES)
def test_counting_a_score_twice_is_the_same_as_having_it_twice(scores):
    first = torch.tensor(scores, dtype=torch.float64)
    counts = torch.arange(len(scores)) % 3 + 1
    repeated = first.repeat_interleave(counts)
    groups = torch.zeros(len(repeated), dtype=torch.int64)
    counted = group_advantages(first, groups[: len(first)], counts=counts)
    torch.testing.assert_close(counted.repeat_interleave(counts), group_advantages(repeated, groups))


@given(scores=SCORES)
def test_leave_one_out_subtracts_the_mean_of_the_others(scores):
    expected = [score - (sum(scores) - score) / (len(scores) - 1) for score in scores]
    result = group_advantages(
        torch.tensor(scores, dtype=torch.float64),
        torch.zeros(len(scores), dtype=torch.int64),
        baseline="leave_one_out",
        scale="none",
    )
    assert result.tolist() == pytest.approx(expected, abs=1e-9)


@given(scores=SCORES, shift=st.floats(-5, 5))
def test_group_ids_may_be_any_integers_in_any_order(scores, shift):
    group = torch.tensor(scores, dtype=torch.float64)
    both = torch.stack([group, group + shift], dim=1).flatten()
    ids = torch.tensor([12, -5]).repeat(len(scores))
    alone = group_advantages(group, torch.zeros(len(scores), dtype=torch.int64), scale="none")
    mixed = group_advantages(both, ids, scale="none").view(-1, 2)
    torch.testing.assert_close(mixed, torch.stack([alone, alone], dim=1))


def test_whitening_counts_only_the_mask_and_stays_zero_outside():
    values = torch.tensor([[1.0, 2.0, torch.nan], [4.0, torch.inf, 9.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    result = whitened(values, mask)
    assert not result[~mask].any()
    assert result[mask].mean().item() == pytest.approx(0)
    assert result[mask].std().item() == pytest.approx(1)


@pytest.mark.parametrize("count", [0, 1])
def test_whitening_of_too_few_tokens_is_zero(count):
    mask = torch.arange(3)[None] < count
    assert not whitened(torch.full((1, 3), 5.0), mask).any()


def test_reward_penalty_reaches_group_advantages():
    algorithm = resolve_preset(
        "grpo",
        {
            "advantage": {"scale": "none"},
            "kl": {"coefficient": 0.5, "estimator": "k1", "placement": "reward"},
        },
    )
    batch = TrajectoryBatch([0, 0], [[1.0], [1.0]], [[0.0]] * 2, [[True]] * 2, [[None]] * 2, [[2], [1]])
    mask = torch.tensor([[True, True], [True, False]])
    rows = RowBatch(
        torch.arange(2),
        mask,
        torch.zeros(2, 2, dtype=torch.int64),
        old_logprobs=torch.tensor([[-1.0, -1.0], [-1.0, torch.nan]]),
        reference_logprobs=torch.tensor([[-2.0, -2.0], [-1.0, torch.nan]]),
    )
    result = compute_advantages(algorithm, batch, rows)
    # Rewards become 1 - 0.5 * 2 and 1.
    torch.testing.assert_close(result.advantages, torch.tensor([[-0.5, -0.5], [0.5, 0.0]]))


def test_clip_bounds_advantages_after_whitening():
    algorithm = resolve_preset("ppo", {"advantage": {"clip": 0.2}})
    case = random_case(4)
    rows = case.rows()
    result = compute_advantages(algorithm, case.batch, rows.row_batch())
    assert result.advantages.abs().max().item() == pytest.approx(0.2)


def test_scores_are_the_returns_of_each_rows_trajectory():
    case = random_case(8)
    rows = case.rows("step")
    result = compute_advantages(PRESETS["grpo"], case.batch, rows.row_batch())
    expected = [sum(case.batch.rewards[index]) for index in rows.trajectory.tolist()]
    assert result.scores.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("cut", [False, True])
def test_returns_of_tokens_pay_the_penalty_from_their_token_on(cut):
    """REINFORCE++ (arXiv:2501.03262): A_t = sum over k >= t of gamma^(k - t) (r_k - beta KL_k), no critic, no group."""
    algorithm = resolve_preset(
        "reinforce_pp", {"advantage": {"gamma": 0.9, "whiten": False}, "kl": {"coefficient": 0.5}}
    )
    batch = TrajectoryBatch([0], [[0.0, 1.0]], [[0.0] * 2], [[True] * 2], [[None] * 2], [[2, 1]])
    if cut:
        mask, turn = torch.tensor([[True, True], [False, True]]), torch.tensor([[0, 0], [-1, 1]])
        apart = torch.tensor([[0.1, 0.2], [torch.nan, 0.3]])
    else:
        mask, turn = torch.tensor([[True, True, False, True]]), torch.tensor([[0, 0, -1, 1]])
        apart = torch.tensor([[0.1, 0.2, torch.nan, 0.3]])
    rows = RowBatch(
        torch.zeros(len(mask), dtype=torch.int64),
        mask,
        turn,
        old_logprobs=apart,
        reference_logprobs=torch.zeros(mask.shape),
    )
    result = compute_advantages(algorithm, batch, rows)
    last = 1.0 - 0.15
    middle = -0.1 + 0.9 * last
    assert result.advantages[mask].tolist() == pytest.approx([-0.05 + 0.9 * middle, middle, last])
    assert result.returns is None


def test_a_turn_split_over_rows_is_refused():
    batch = TrajectoryBatch([0], [[1.0]], [[0.0]], [[True]], [[None]], [[2]])
    rows = RowBatch(
        torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int64)
    )
    with pytest.raises(ValueError, match="must lie in one row"):
        compute_advantages(PRESETS["grpo"], batch, rows)


def test_a_token_of_a_turn_that_is_not_there_is_refused():
    batch = TrajectoryBatch([0], [[1.0]], [[0.0]], [[True]], [[None]], [[1]])
    rows = RowBatch(torch.tensor([0]), torch.ones(1, 1, dtype=torch.bool), torch.tensor([[1]]))
    with pytest.raises(ValueError, match="does not have"):
        compute_advantages(PRESETS["grpo"], batch, rows)


def test_missing_values_are_named():
    case = random_case(1)
    rows = case.rows()
    with pytest.raises(ValueError, match="'values'"):
        compute_advantages(PRESETS["ppo"], case.batch, RowBatch(rows.trajectory, rows.mask, rows.turn_index))


def test_batch_parts_must_fit_each_other():
    with pytest.raises(ValueError, match="'anchors'"):
        TrajectoryBatch([0], [[1.0]], [[0.0]], [[True]], [[None, None]], [[1]])
    with pytest.raises(ValueError, match="2 groups"):
        TrajectoryBatch([0, 1], [[1.0]], [[0.0]], [[True]], [[None]], [[1]])


def lengths_as_advantages(batch):
    return [[float(count) for count in turns] for turns in batch.tokens]


def wrong_shape(batch):
    return [[0.0] for _ in batch.tokens]


def even_groups(groups, returns):
    return {group for group in groups if group % 2 == 0}


def test_advantage_function_of_the_user():
    algorithm = resolve_preset(
        "grpo", {"advantage": {"kind": "custom", "function": f"{__name__}:lengths_as_advantages"}}
    )
    case = random_case(2)
    rows = case.rows()
    result = compute_advantages(algorithm, case.batch, rows.row_batch())
    for row, turns in enumerate(case.batch.tokens):
        expected = [float(count) for count in turns for _ in range(count)]
        assert result.advantages[row][rows.mask[row]].tolist() == expected


def test_advantage_function_with_missing_turns_is_refused():
    algorithm = resolve_preset(
        "grpo", {"advantage": {"kind": "custom", "function": f"{__name__}:wrong_shape"}}
    )
    case = random_case(2)
    with pytest.raises(PluginError, match="one advantage per turn"):
        compute_advantages(algorithm, case.batch, case.rows().row_batch())


def test_filter_function_of_the_user():
    algorithm = resolve_preset("grpo", {"filter": {"kind": "custom", "function": f"{__name__}:even_groups"}})
    result = select_groups(algorithm, random_case(2, groups=3).batch)
    assert result.kept == [0, 2]
    assert result.dropped == {1: "custom"}
