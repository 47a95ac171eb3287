"""Options of single implementations, against their formulas in plain loops or numbers that their code gives."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.algorithms.advantages import (
    gdpo_advantages,
    generalized_advantages,
    group_advantages,
    length_adaptive_lambda,
    token_returns,
)
from rollgym.trainer.algorithms.aggregation import Denominators
from rollgym.trainer.algorithms.batch import LossInputs, RowBatch, TrajectoryBatch
from rollgym.trainer.algorithms.corrections import interpolated_logprobs
from rollgym.trainer.algorithms.credit import after_update, compute_advantages
from rollgym.trainer.algorithms.filter_settings import ShortestEpisodes
from rollgym.trainer.algorithms.kl import centred_kl_advantages, kl_estimate
from rollgym.trainer.algorithms.losses import dppo_surrogate, positive_nll
from rollgym.trainer.algorithms.objective import policy_loss
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.rewards import turn_rewards
from rollgym.trainer.algorithms.selection import choose_episodes, shortest
from rollgym.trainer.algorithms.state import AlgorithmState, moving_baseline_advantages

SCORES = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
ONE_GROUP = torch.zeros(8, dtype=torch.int64)
# Two turns with an observation of two tokens between them, and a shorter row.
MASK = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 0, 0, 0]]).bool()
REWARDS = torch.tensor([[0, 0.5, 9, 9, 0, 1.0], [0, 0, 2.0, 9, 9, 9]])


@given(
    st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=12),
    st.sampled_from(["group_std", "batch_std", "rest_std", "centred_std", "group_mean"]),
    st.sampled_from(["mean", "leave_one_out", "batch_mean"]),
    st.randoms(),
)
def test_no_scale_depends_on_order_or_on_the_unit_of_scores(values, scale, baseline, chance):
    scores = torch.tensor(values, dtype=torch.float64)
    groups = torch.tensor([chance.randrange(3) for _ in values])
    order = torch.tensor(chance.sample(range(len(values)), len(values)))

    def of(scores, groups):
        return group_advantages(scores, groups, baseline=baseline, scale=scale, epsilon=1e-12)

    found = of(scores, groups)
    assert found.isfinite().all()
    assert torch.allclose(of(scores[order], groups[order]), found[order], atol=1e-9)
    equal = torch.stack([scores[groups == group].std(unbiased=False) for group in groups]) < 1e-9
    if scale != "rest_std" and baseline != "batch_mean" and scale != "group_mean":
        assert found[equal].abs().max() < 1e-9 if equal.any() else True
    if scale != "rest_std":
        assert torch.allclose(of(7 * scores, groups), found, atol=1e-9)
    if scale not in ("rest_std", "group_mean"):
        assert torch.allclose(of(scores + 5, groups), found, atol=1e-6)


def test_max_rl_divides_by_the_mean():
    # (N - K) / K of K successes in N (arXiv:2602.02710), -1 for failures; nothing where nobody succeeds.
    found = group_advantages(SCORES, ONE_GROUP, scale="group_mean", epsilon=0.0)
    assert found.tolist() == pytest.approx([3, -1, -1, 3, -1, -1, -1, -1])
    assert group_advantages(torch.zeros(3), torch.zeros(3), scale="group_mean").tolist() == [0, 0, 0]


@pytest.mark.parametrize("biased", [False, True])
def test_the_deviation_of_the_others(biased):
    # NeMo-RL calculate_baseline_and_std_per_prompt(leave_one_out_baseline=True): mean and std of the other members.
    scores = torch.tensor([1.0, 0.25, 0.0, 0.7, 2.0, 2.0, 5.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    found = group_advantages(
        scores, groups, baseline="leave_one_out", scale="rest_std", epsilon=0.0, biased=biased
    )
    for place in range(len(scores)):
        others = scores[(groups == groups[place]) & (torch.arange(7) != place)].double()
        std = others.std(unbiased=not biased)
        expected = scores[place] - others.mean()
        if std > 0:
            expected = expected / std
        assert found[place].item() == pytest.approx(expected.item(), abs=1e-9)


def test_the_deviation_of_centred_scores():
    # trainers' golden vector: [1, 0] and [1, 1, 1, 0] centred have the deviation 0.5, raw ones 0.5164.
    scores, groups = torch.tensor([1.0, 0, 1, 1, 1, 0]), torch.tensor([0, 0, 1, 1, 1, 1])
    found = group_advantages(scores, groups, scale="centred_std", epsilon=0.0)
    assert found.tolist() == pytest.approx([1, -1, 0.5, 0.5, 0.5, -1.5])


@pytest.mark.parametrize(
    ("return_mask", "first", "second"),
    [
        ("skip", [0.5 * 0.5 + 0.125, 0.5 + 0.25, 0.5, 1.0], [0.5, 1.0, 2.0]),
        ("none", [0.25 + 0.5**5, 0.5 + 0.5**4, 0.5, 1.0], [0.5, 1.0, 2.0]),
        ("reset", [0.25, 0.5, 0.5, 1.0], [0.5, 1.0, 2.0]),
    ],
)
def test_returns_of_tokens_over_observations(return_mask, first, second):
    found = token_returns(REWARDS, MASK, discount=0.5, return_mask=return_mask)
    assert found[MASK].tolist() == pytest.approx([*first, *second])
    assert (found[~MASK] == 0).all()


@given(st.floats(0.0, 1.0), st.integers(0, 10_000))
def test_returns_that_skip_are_those_of_a_critic_that_says_nothing(discount, seed):
    rewards = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(seed + 1)) < 0.6
    expected, _ = generalized_advantages(rewards, torch.zeros(3, 9), mask, gamma=discount, gae_lambda=1.0)
    assert torch.equal(token_returns(rewards, mask, discount=discount), expected)


def test_a_trace_that_grows_with_the_length():
    # VAPO: lambda = 1 - 1 / (alpha l), alpha 0.05; a short row has none.
    mask = torch.arange(100) < torch.tensor([[100], [40], [10]])
    assert length_adaptive_lambda(mask, 0.05).tolist() == pytest.approx([0.8, 0.5, 0.0])
    values = torch.rand(3, 100)
    whole, _ = generalized_advantages(
        torch.zeros(3, 100), values, mask, gamma=1.0, gae_lambda=length_adaptive_lambda(mask, 0.05)
    )
    for row, trace in enumerate([0.8, 0.5, 0.0]):
        alone, _ = generalized_advantages(
            torch.zeros(1, 100), values[[row]], mask[[row]], gamma=1.0, gae_lambda=trace
        )
        assert torch.allclose(whole[[row]], alone, atol=1e-12)


def test_several_rewards_each_normalised():
    scores = torch.tensor([[1.0, 0.0, 0.0], [5.0, 5.0, 9.0]])
    found = gdpo_advantages(scores, torch.zeros(3), weights=[2.0, 0.5])
    first, second = (group_advantages(each, torch.zeros(3)) for each in scores)
    assert torch.allclose(found, 2 * first + 0.5 * second)


def test_a_moving_baseline_takes_a_return_in_after_it_is_compared():
    # prime-rl RAEAlgorithm: baseline 0 first, then decay * baseline + (1 - decay) * reward, by role.
    advantages, averages = moving_baseline_advantages([1.0, 1.0, -1.0], ["a", "a", "b"], {"b": 0.5}, 0.9)
    assert advantages == pytest.approx([1.0, 0.9, -1.5])
    assert averages == pytest.approx({"a": 0.19, "b": 0.35})


def batch_of(rewards, **more) -> TrajectoryBatch:
    one = [[True] for _ in rewards]
    return TrajectoryBatch(
        groups=[0] * len(rewards),
        rewards=[[reward] for reward in rewards],
        format_penalties=[[0.0] for _ in rewards],
        valid=one,
        anchors=[[None] for _ in rewards],
        tokens=[[2] for _ in rewards],
        **more,
    )


def rows_of(count, **more) -> RowBatch:
    shape = (count, 2)
    return RowBatch(
        torch.arange(count), torch.ones(shape, dtype=torch.bool), torch.zeros(shape).long(), **more
    )


def test_moving_baselines_go_on_from_step_to_step_and_through_plain_data():
    settings = resolve_preset("rae", {})
    batch = batch_of([1.0, 0.0, 1.0], domains=["x", "y", "x"])
    state = after_update(settings, AlgorithmState(), batch, 0.0)
    assert state.baselines == pytest.approx({"x": 0.0975, "y": 0.0})
    assert AlgorithmState.from_dict(state.as_dict()) == state
    found = compute_advantages(settings, batch, rows_of(3), state).advantages[:, 0]
    assert found.tolist() == pytest.approx([1 - 0.0975, 0.0, 1 - (0.95 * 0.0975 + 0.05)])
    older = {name: part for name, part in state.as_dict().items() if name != "baselines"}
    assert AlgorithmState.from_dict(older).baselines == {}, "a checkpoint of before there were any"


def test_a_kl_penalty_with_a_baseline():
    # tinker-cookbook incorporate_kl_penalty: coefficient * (mean over all tokens - own difference).
    logprobs, reference = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]), torch.full((2, 2), -1.0)
    mask = torch.tensor([[1, 1], [1, 0]]).bool()
    found = centred_kl_advantages(logprobs, reference, mask, 0.5)
    assert found.tolist() == [[-0.5, 0.0], [0.5, 0.0]]

    kl = {"coefficient": 0.5, "estimator": "k1", "placement": "advantage"}
    settings = resolve_preset("dr_grpo", {"kl": kl})
    assert settings.needs_old_logprobs
    rows = rows_of(2, old_logprobs=logprobs, reference_logprobs=reference)
    batch = batch_of([1.0, 0.0])
    plain = compute_advantages(resolve_preset("dr_grpo", {}), batch, rows).advantages
    charged = compute_advantages(settings, batch, rows).advantages
    expected = centred_kl_advantages(logprobs, reference, rows.mask, 0.5)
    assert torch.allclose(charged, plain + expected.float())
    assert charged.sum() == pytest.approx(plain.sum()), "it costs nothing in the mean"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_a_limit_of_every_estimator(estimator):
    # AReaL and OpenRLHF clamp what any estimator gives within +-10.
    d = torch.tensor([-30.0, -6.0, -1.0, 1.0, 6.0, 30.0])
    found = kl_estimate(d, torch.zeros(6), estimator, bounded=False, limit=10.0)
    plain = {"k1": d, "k2": d.square() / 2, "k3": torch.exp(-d) - 1 + d, "abs": d.abs()}[estimator]
    assert torch.allclose(found, plain.clamp(-10, 10))


def test_a_trust_region_whatever_the_sign():
    # INTELLECT's IPO: |p - p_old| above the bounds has no gradient, whichever way the advantage points.
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.5]))
    new = torch.log(torch.tensor([0.75, 0.75, 0.25, 0.25])).requires_grad_()
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
    one = dppo_surrogate(new, old, signs, low=0.2, high=0.2)
    assert one.clipped.tolist() == [True, False, False, True]
    both = dppo_surrogate(new, old, signs, low=0.2, high=0.2, two_sided=True)
    assert both.clipped.tolist() == [True] * 4
    both.loss.sum().backward()
    assert new.grad.tolist() == [0, 0, 0, 0]
    assert dppo_surrogate(new, old, signs, low=0.3, high=0.2, two_sided=True).clipped.tolist() == [
        True,
        True,
        False,
        False,
    ]


def test_proximal_probabilities_between_two_policies():
    lp, behaviour = torch.log(torch.tensor([0.4])), torch.log(torch.tensor([0.2]))
    share = torch.tensor([0.25])
    assert interpolated_logprobs(lp, behaviour, share).exp().item() == pytest.approx(0.2 * 2**0.25)


def test_the_likelihood_of_what_went_well_does_not_depend_on_micro_batches():
    # NeMo-RL positive_example_nll_weight: the mean of -lp over tokens of samples with a reward above 0.
    logprobs = torch.tensor([[-1.0, -2.0], [-4.0, -8.0], [-3.0, -5.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]]).bool()
    scores = torch.tensor([1.0, 0.0, 2.0])
    assert positive_nll(logprobs, scores).tolist() == [[1, 2], [0, 0], [3, 5]]
    plain = resolve_preset("grpo", {})
    settings = resolve_preset("grpo", {"positive_nll": {"coefficient": 0.5}})
    counts = replace(Denominators.from_mask(mask), positive_tokens=3)
    inputs = LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=logprobs,
        advantages=torch.zeros(3, 2),
        mask=mask,
        turn_index=torch.zeros(3, 2).long(),
        scores=scores,
    )
    whole = policy_loss(settings, inputs, counts)[0] - policy_loss(plain, inputs, counts)[0]
    assert whole.item() == pytest.approx(0.5 * (1 + 2 + 3) / 3)
    parts = [
        policy_loss(settings, inputs.select(torch.tensor(rows)), counts)[0]
        - policy_loss(plain, inputs.select(torch.tensor(rows)), counts)[0]
        for rows in ([0], [1, 2])
    ]
    assert sum(parts).item() == pytest.approx(whole.item())


def test_the_shortest_of_a_group():
    lengths, returns = [5, 2, 9, 2], [10.0, 1.0, 9.0, 0.0]
    assert shortest(lengths, returns, 2) == [1, 3]
    assert shortest(lengths, returns, 2, per_token=True) == [0, 2]
    assert shortest(lengths, returns, 9) == [0, 1, 2, 3]
    batch = replace(batch_of(returns), tokens=[[length] for length in lengths], groups=[0, 0, 1, 1])
    choice = choose_episodes(ShortestEpisodes(kind="shortest", size=1), batch, returns)
    assert choice.kept == [False, True, False, True]
    assert not choice.in_statistics


def test_what_was_cut_off_earns_less():
    # NeMo-RL stop_properly_penalty_coef: rewards of truncated samples times the coefficient.
    batch = batch_of([1.0, 0.5, 2.0], truncated=[True, False, True])
    settings = resolve_preset("grpo", {"reward": {"truncated_scale": 0.25, "scale": 2.0}}).reward
    assert turn_rewards(settings, batch) == [[0.5], [1.0], [1.0]]
    assert turn_rewards(settings, batch_of([1.0])) == [[2.0]], "where nobody says so, nothing was"


def test_the_critic_learns_by_a_trace_of_its_own():
    advantage = {"whiten": False, "length_adaptive": 1.0, "critic_gae_lambda": 1.0}
    settings = resolve_preset("ppo", {"advantage": advantage})
    rows = rows_of(1, values=torch.tensor([[0.2, 0.6]]))
    found = compute_advantages(settings, batch_of([1.0]), rows)
    # Two tokens: lambda 1/2. d = 0.4 and 0.4.
    assert found.advantages.tolist()[0] == pytest.approx([0.4 + 0.5 * 0.4, 0.4])
    assert found.returns.tolist()[0] == pytest.approx([1.0, 1.0])
    with pytest.raises(ValueError, match="length_adaptive takes the place of gae_lambda"):
        resolve_preset("ppo", {"advantage": {"gae_lambda": 0.9, "length_adaptive": 0.05}})


def test_an_optimal_baseline_needs_what_backends_compute():
    settings = resolve_preset("otb", {})
    assert settings.needs_old_logprobs
    assert settings.needs_squared_probabilities
    old = torch.log(torch.tensor([[0.5, 0.25], [0.5, 0.5]]))
    squares = torch.tensor([[0.5, 0.4], [0.5, 0.5]])
    rows = rows_of(2, old_logprobs=old, squared_probabilities=squares)
    found = compute_advantages(settings, batch_of([1.0, 0.0]), rows).advantages
    # Energies 1 - 2 p + sum of squares, summed up to each token.
    first = [1 - 1 + 0.5, 1 - 0.5 + 0.4]
    second = [1 - 1 + 0.5, 1 - 1 + 0.5]
    for place in range(2):
        w0, w1 = sum(first[: place + 1]), sum(second[: place + 1])
        assert found[0, place].item() == pytest.approx(1 - w0 / (w0 + w1), abs=1e-6)
        assert found[1, place].item() == pytest.approx(-w0 / (w0 + w1), abs=1e-6)
    with pytest.raises(ValueError, match="'squared_probabilities', which is missing"):
        compute_advantages(settings, batch_of([1.0, 0.0]), rows_of(2, old_logprobs=old))


def test_no_weight_is_read_without_what_reads_it():
    with pytest.raises(ValueError, match=r"positive_nll\.score_threshold is read"):
        resolve_preset("grpo", {"positive_nll": {"score_threshold": 0.5}})
    with pytest.raises(ValueError, match=r"set kl\.estimator to k1"):
        resolve_preset("grpo", {"kl": {"coefficient": 0.1, "estimator": "k3", "placement": "advantage"}})
    assert math.isclose(resolve_preset("vapo", {}).positive_nll.coefficient, 0.1)
