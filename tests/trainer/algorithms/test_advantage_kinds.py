"""Baselines and advantage kinds against their papers' formulas, in plain loops."""

import math

import numpy as np
import pytest
import torch

from rollgym.trainer.algorithms.advantages import (
    generalized_advantages,
    group_advantages,
    informative_factor,
    whitened,
)
from rollgym.trainer.algorithms.batch import RowBatch, TrajectoryBatch
from rollgym.trainer.algorithms.credit import after_update, compute_advantages
from rollgym.trainer.algorithms.hgpo import hgpo_advantages
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.state import AlgorithmState
from rollgym.trainer.algorithms.token_credit import optimal_token_baseline_advantages

SCORES = torch.tensor([1.0, 0.0, 0.5, 0.2, 0.2, 0.9])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 2])


def relative(**options):
    return group_advantages(SCORES, GROUPS, scale="none", **options).tolist()


def test_baseline_weighted_by_length():
    # OPO, arXiv:2505.23585, equation 8; verl compute_opo_outcome_advantage.
    lengths = torch.tensor([10.0, 30.0, 20.0, 7.0, 5.0, 3.0])
    first = (10 * 1.0 + 20 * 0.5) / 60
    assert relative(baseline="length_weighted", lengths=lengths) == pytest.approx(
        [1 - first, -first, 0.5 - first, 0, 0, 0], abs=1e-6
    )


def test_greedy_baseline_counts_in_a_group_of_one_too():
    # ReMax, arXiv:2310.10505, equation 6.
    greedy = torch.tensor([0.3, 0.3, 0.3, 0.1, 0.1, 1.0])
    assert relative(baseline="greedy", greedy=greedy) == pytest.approx([0.7, -0.3, 0.2, 0.1, 0.1, -0.1])


def test_pass_at_k_gives_the_best_member_its_lead():
    # verl compute_grpo_passk_outcome_advantage, with and without the deviation.
    assert relative(baseline="second_best") == pytest.approx([0.5, 0, 0, 0, 0, 0])
    scaled = group_advantages(SCORES, GROUPS, baseline="second_best").tolist()
    assert scaled[0] == pytest.approx(0.5 / (np.std([1.0, 0.0, 0.5], ddof=1) + 1e-6))


def test_batch_mean_and_biased_deviation():
    mean = float(SCORES.mean())
    assert relative(baseline="batch_mean") == pytest.approx(
        [score - mean for score in SCORES.tolist()], abs=1e-6
    )
    biased = group_advantages(SCORES, GROUPS, biased=True).tolist()
    assert biased[0] == pytest.approx(0.5 / (np.std([1.0, 0.0, 0.5]) + 1e-6), abs=1e-5)


def test_baselines_read_what_they_need():
    with pytest.raises(ValueError, match="lengths"):
        relative(baseline="length_weighted")
    with pytest.raises(ValueError, match="greedy episodes' scores"):
        relative(baseline="greedy")


def test_gpg_factor():
    # arXiv:2504.02546, 3.2: B / (B - M); verl counts scores that are not 0.
    assert informative_factor(SCORES, GROUPS, "informative") == pytest.approx(6 / 3)
    assert informative_factor(SCORES, GROUPS, "nonzero_scores") == pytest.approx(6 / 5)
    assert informative_factor(torch.zeros(4), torch.zeros(4).long(), "informative") == 4
    assert informative_factor(SCORES, GROUPS, "none") == 1


@pytest.mark.parametrize(
    ("form", "divided"),
    [
        ("variance", lambda variance: 1 / math.sqrt(variance + 0.1)),
        ("deviation", lambda variance: 1 / (math.sqrt(variance) + 0.1)),
        ("floor", lambda variance: 1 / math.sqrt(max(variance, 0.1))),
    ],
)
def test_forms_of_whitening(form, divided):
    # verl masked_whiten, AReaL masked_normalization, OpenRLHF's clamp.
    values = torch.tensor([[0.1, 0.3, 9.0], [0.2, 0.5, 0.4]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    plain = [0.1, 0.3, 0.2, 0.5, 0.4]
    variance, mean = np.var(plain), np.mean(plain)
    result = whitened(values, mask, unbiased=False, epsilon=0.1, form=form)
    assert result[mask].tolist() == pytest.approx([(v - mean) * divided(variance) for v in plain], abs=1e-6)


def test_gae_that_steps_through_observations():
    # Golden numbers of the zero-mask variant: 1.008604, 1.00956.
    rewards, values = torch.tensor([[0, 0.5, 0, 0, 0, 1]]), torch.tensor([[0.1, 0.2, 9, 9, 0.3, 0.4]])
    mask = torch.tensor([[True, True, False, False, True, True]])
    advantages, _ = generalized_advantages(
        rewards, values * mask, mask, gamma=1.0, gae_lambda=0.9, gae_mask="none"
    )
    assert advantages[mask].tolist() == pytest.approx([1.008604, 1.00956, 0.64, 0.6], abs=1e-5)
    assert not advantages[~mask].any()
    # ROLL reads whatever the critic says there.
    leaked, _ = generalized_advantages(rewards, values, mask, gamma=1.0, gae_lambda=0.9, gae_mask="none")
    assert leaked[0, 1].item() != pytest.approx(1.00956, abs=1e-3)


def hgpo_by_loop(rewards, groups, anchors, *, gamma, history, alpha, std):
    """arXiv:2602.22817, section 4: nested groups of equal histories, weighted by (k + 1)^alpha."""
    returns = []
    for turns in rewards:
        total, line = 0.0, []
        for reward in reversed(turns):
            total = reward + gamma * total
            line.insert(0, total)
        returns.append(line)
    steps = [(row, turn) for row, turns in enumerate(rewards) for turn in range(len(turns))]
    result = [[0.0] * len(turns) for turns in rewards]
    for row, turn in steps:
        found = []
        for k in range(1, min(history, turn) + 2):
            mine = anchors[row][turn - k + 1 : turn + 1]
            same = [
                (r, t)
                for r, t in steps
                if groups[r] == groups[row] and t >= k - 1 and anchors[r][t - k + 1 : t + 1] == mine
            ]
            if len(same) < 2 or None in mine:
                continue
            values = np.array([returns[r][t] for r, t in same])
            advantage = returns[row][turn] - values.mean()
            if std:
                advantage /= values.std() + 1e-6
            if abs(advantage) > 1e-9:
                found.append(((k + 1) ** alpha, advantage))
        if found:
            result[row][turn] = sum(w * a for w, a in found) / (sum(w for w, _ in found) + 1e-6)
    return result


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(("history", "alpha"), [(2, 1.0), (0, 1.0), (5, 2.0)])
def test_hgpo(std, history, alpha):
    draws = np.random.default_rng(3)
    rewards = [[float(draws.integers(2)) for _ in range(draws.integers(1, 6))] for _ in range(8)]
    anchors = [[str(draws.integers(2)) if draws.random() > 0.1 else None for _ in turns] for turns in rewards]
    groups = [0, 0, 0, 0, 1, 1, 1, 2]
    found = hgpo_advantages(
        rewards, groups, anchors, normalise_std=std, history=history, length_weight=alpha, turn_discount=0.9
    )
    expected = hgpo_by_loop(rewards, groups, anchors, gamma=0.9, history=history, alpha=alpha, std=std)
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, abs=1e-6)


def test_hgpo_with_the_episode_as_one_of_the_groups():
    plain = hgpo_advantages([[1.0], [0.0]], [0, 0], [["a"], ["b"]], normalise_std=False)
    assert plain == [[0.0], [0.0]], "no state comes twice"
    based = hgpo_advantages([[1.0], [0.0]], [0, 0], [["a"], ["b"]], normalise_std=False, episode_group=True)
    assert [line[0] for line in based] == pytest.approx([0.5, -0.5], abs=1e-5)


def baseline_by_loop(rewards, mask, groups, logprobs, squares):
    """B_t = sum G_t W_t / sum W_t over the t-th sampled tokens of a group's members."""
    places = [[at for at, flag in enumerate(line) if flag] for line in mask]
    returns = [
        [sum(rewards[row][p] for p in places[row][t:]) for t in range(len(places[row]))]
        for row in range(len(mask))
    ]
    energy = [
        [
            sum(1 - 2 * math.exp(logprobs[row][p]) + squares[row][p] for p in places[row][: t + 1])
            for t in range(len(places[row]))
        ]
        for row in range(len(mask))
    ]
    result = []
    for row in range(len(mask)):
        peers = [other for other in range(len(mask)) if groups[other] == groups[row] and places[other]]
        lengths = sorted(len(places[other]) for other in peers)
        line = []
        for t in range(len(places[row])):
            there = [other for other in peers if len(places[other]) > t]
            level = sum(returns[o][t] * energy[o][t] for o in there) / (
                sum(energy[o][t] for o in there) + 1e-8
            )
            if len(peers) < 2 or t >= lengths[-2]:
                level = 0.0
            line.append(returns[row][t] - level)
        result.append(line)
    return result


def test_optimal_token_baseline():
    # verl compute_multi_turn_optimal_token_baseline_advantage
    draws = np.random.default_rng(5)
    mask = draws.random((5, 7)) > 0.3
    rewards = np.where(mask, draws.random((5, 7)), 0.0)
    logprobs, squares = -draws.exponential(1.0, (5, 7)), draws.random((5, 7))
    groups = [0, 0, 0, 1, 1]
    advantages, returns = optimal_token_baseline_advantages(
        torch.tensor(rewards),
        torch.tensor(mask),
        torch.tensor(groups),
        torch.tensor(logprobs),
        torch.tensor(squares),
    )
    expected = baseline_by_loop(rewards.tolist(), mask.tolist(), groups, logprobs.tolist(), squares.tolist())
    for row, line in enumerate(expected):
        assert advantages[row, torch.tensor(mask[row])].tolist() == pytest.approx(line, abs=1e-6)
    assert not advantages[~torch.tensor(mask)].any()
    assert returns[0, 0].item() == pytest.approx(rewards[0].sum())


def one_token_batch(returns, groups, **extra):
    count = len(returns)
    batch = TrajectoryBatch(
        groups,
        [[value] for value in returns],
        [[0.0]] * count,
        [[True]] * count,
        [[None]] * count,
        [[1]] * count,
        **extra,
    )
    rows = RowBatch(torch.arange(count), torch.ones(count, 1, dtype=torch.bool), torch.zeros(count, 1).long())
    return batch, rows


def test_gdpo_normalises_each_reward_by_itself():
    # arXiv:2601.05242, equations 4 to 6; verl compute_gdpo_outcome_advantage.
    parts = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 10.0}, {"right": 1.0, "short": 30.0}]
    batch, rows = one_token_batch([1.0, 10.0, 31.0], [0, 0, 0], parts=[[each] for each in parts])

    def apart(name):
        values = np.array([each[name] for each in parts])
        return (values - values.mean()) / (values.std(ddof=1) + 1e-6)

    total = apart("right") + 0.5 * apart("short")
    expected = (total - total.mean()) / math.sqrt(total.var(ddof=1) + 1e-8)
    settings = resolve_preset("gdpo", {"advantage": {"weights": {"right": 1.0, "short": 0.5}}})
    found = compute_advantages(settings, batch, rows).advantages[:, 0].tolist()
    assert found == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [([[{}]] * 2, {}, "info\\['reward_parts'\\]"), ([[{"a": 1.0}]] * 2, {"b": 1.0}, "there are \\['a'\\]")],
)
def test_gdpo_names_what_is_missing(parts, weights, message):
    batch, rows = one_token_batch([1.0, 0.0], [0, 0], parts=parts)
    settings = resolve_preset("gdpo", {"advantage": {"weights": weights}})
    with pytest.raises(ValueError, match=message):
        compute_advantages(settings, batch, rows)


def test_spo_compares_with_what_a_task_was_worth_so_far():
    # arXiv:2509.13232, section 3; verl-recipe spo: rho in [0.875, 0.96], D_half 0.06, 8 pseudo-counts.
    settings = resolve_preset("spo", {})
    batch, rows = one_token_batch([1.0, 0.0, 1.0], [0, 1, 2], tasks=["a", "b", "c"])
    state = AlgorithmState()
    first = compute_advantages(settings, batch, rows, state).advantages[:, 0].tolist()
    ahead = np.array([1.0, 0.0, 1.0]) - 0.5
    assert first == pytest.approx(((ahead - ahead.mean()) / ahead.std(ddof=1)).tolist(), abs=1e-5)

    # What was never played has nothing to forget: the largest rho.
    state = after_update(settings, state, batch, moved=0.01)
    counts = {key: [0.96 * 4, 0.96 * 4] for key in "abc"}
    for key, earned in zip("abc", [1, 0, 1], strict=True):
        counts[key][0] += earned
        counts[key][1] += 1 - earned
    state = after_update(settings, state, batch, moved=0.01)
    rho = 2 ** (-0.01 / 0.06)
    assert 0.875 < rho < 0.96
    for key, earned in zip("abc", [1, 0, 1], strict=True):
        counts[key] = [rho * counts[key][0] + earned, rho * counts[key][1] + 1 - earned]
    worth = {key: good / (good + bad) for key, (good, bad) in counts.items()}
    assert {key: each.value for key, each in state.worths.items()} == pytest.approx(worth)
    second = compute_advantages(settings, batch, rows, state).advantages[:, 0].tolist()
    ahead = np.array([1.0, 0.0, 1.0]) - np.array([worth[key] for key in "abc"])
    assert second == pytest.approx(((ahead - ahead.mean()) / ahead.std(ddof=1)).tolist(), abs=1e-5)


def test_spo_needs_to_know_the_task():
    batch, rows = one_token_batch([1.0, 0.0], [0, 1])
    with pytest.raises(ValueError, match="reads the task of each episode"):
        compute_advantages(resolve_preset("spo", {}), batch, rows)


def test_a_missing_greedy_episode_is_named():
    batch, rows = one_token_batch([1.0, 0.0], [0, 1])
    with pytest.raises(ValueError, match="none was played"):
        compute_advantages(resolve_preset("remax", {}), batch, rows)


def test_the_greedy_episode_is_shaped_like_its_group():
    greedy, _ = one_token_batch([5.0, 0.2], [7, 8])
    batch, rows = one_token_batch([1.0, 0.0], [7, 8], greedy=greedy)
    settings = resolve_preset("remax", {"reward": {"turn_high": 1.0, "scale": 2.0}})
    found = compute_advantages(settings, batch, rows).advantages[:, 0].tolist()
    assert found == pytest.approx([2.0 - 2.0, 0.0 - 0.4])


def test_kl_at_its_token_with_a_group_baseline():
    # REINFORCE++-baseline with a penalty at each token: returns from a token on, less the group's mean return.
    batch, _ = one_token_batch([1.0, 0.0], [0, 0])
    batch = TrajectoryBatch([0, 0], [[1.0], [0.0]], [[0.0]] * 2, [[True]] * 2, [[None]] * 2, [[2], [2]])
    mask = torch.ones(2, 2, dtype=torch.bool)
    rows = RowBatch(
        torch.arange(2),
        mask,
        torch.zeros(2, 2).long(),
        old_logprobs=torch.tensor([[-1.0, -1.0], [-2.0, -1.0]]),
        reference_logprobs=torch.tensor([[-1.5, -1.0], [-2.0, -1.2]]),
    )
    settings = resolve_preset(
        "reinforce_pp", {"advantage": {"whiten": False, "baseline": "group_mean"}, "kl": {"coefficient": 0.1}}
    )
    kl = [[0.5, 0.0], [0.0, 0.2]]
    returns = [[1 - 0.1 * (kl[0][0] + kl[0][1]), 1.0], [-0.1 * kl[1][1], -0.1 * kl[1][1]]]
    mean = (returns[0][0] + returns[1][0]) / 2
    expected = [[value - mean for value in line] for line in returns]
    found = compute_advantages(settings, batch, rows).advantages
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)
