"""What is made of all tokens of an optimizer step at once: selections against loops, and who sees what."""

import math

import pytest
import torch

from rollgym.trainer.algorithms.batch import StepTokens
from rollgym.trainer.algorithms.prepare import (
    clip_cov_mask,
    covariances,
    high_entropy_mask,
    kl_cov_mask,
    prepare_step,
    second_moment_mask,
)
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.core.errors import InvalidNumberError, PluginError
from tests.support.algorithm_cases import random_case


def dropped_by_loop(moves, threshold):
    """M2PO, arXiv:2510.01161, algorithm 1: drop the largest until the mean square of the rest is below."""
    left = list(range(len(moves)))
    while len(left) > 1 and sum(moves[at] ** 2 for at in left) / len(left) >= threshold:
        left.remove(max(left, key=lambda at: moves[at] ** 2))
    return [at in left for at in range(len(moves))]


@pytest.mark.parametrize("threshold", [0.001, 0.04, 0.3, 9.0])
def test_second_moment(threshold):
    moves = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 0.5
    kept = second_moment_mask(moves, threshold)
    assert kept.tolist() == dropped_by_loop(moves.tolist(), threshold)
    assert kept.any()


def test_second_moment_of_nothing_and_of_one_token_far_off():
    assert second_moment_mask(torch.zeros(0)).tolist() == []
    assert second_moment_mask(torch.tensor([3.0])).tolist() == [True], "AReaL keeps the last one"


def test_clip_cov_draws_from_the_band():
    # verl compute_policy_loss_clip_cov: lb < cov < ub, max(int(ratio * tokens), 1) of them at random.
    covariance = torch.tensor([0.5, 1.5, 2.0, 4.9, 5.0, 9.0, 3.0])
    candidates = torch.tensor([True, True, True, True, True, True, False])
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        kept = clip_cov_mask(covariance, candidates, fraction=0.3, generator=generator)
        lost = (~kept).nonzero()[:, 0].tolist()
        assert len(lost) == 2
        assert set(lost) <= {1, 2, 3}
    few = clip_cov_mask(covariance, candidates, fraction=1e-6, generator=torch.Generator().manual_seed(0))
    assert (~few).sum() == 1


def test_kl_cov_takes_the_largest():
    # verl compute_policy_loss_kl_cov: topk of max(1, int(n * ratio))
    covariance = torch.tensor([0.1, 3.0, -4.0, 2.0, 3.0])
    assert kl_cov_mask(covariance, fraction=0.4).tolist() == [False, True, False, False, True]
    assert kl_cov_mask(covariance, fraction=1e-4).tolist() == [False, True, False, False, False]


def test_covariance_is_about_the_means_of_all_tokens():
    logprobs, advantages = [-1.0, -0.2, -3.0], [2.0, -1.0, 0.5]
    mean_lp, mean_a = sum(logprobs) / 3, sum(advantages) / 3
    expected = [(a - mean_a) * (lp - mean_lp) for lp, a in zip(logprobs, advantages, strict=True)]
    assert covariances(torch.tensor(logprobs), torch.tensor(advantages)).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 1.0])
def test_high_entropy_tokens(fraction):
    # TRL get_high_entropy_mask: entropy >= quantile(entropies, 1 - fraction)
    entropy = torch.rand(41, generator=torch.Generator().manual_seed(2))
    expected = entropy >= torch.quantile(entropy.double(), 1 - fraction)
    assert high_entropy_mask(entropy, fraction=fraction).tolist() == expected.tolist()


def weights_of(settings, seed=0, layout="trajectory"):
    rows = random_case(11).rows(layout)
    generator = torch.Generator().manual_seed(1)
    of_tokens = torch.randn(rows.mask.sum(), generator=generator)
    advantages = torch.zeros(rows.mask.shape)
    advantages[rows.mask] = of_tokens
    made = prepare_step(settings, rows.step_tokens(advantages), seed)
    return made, rows, advantages


def test_weights_and_selection_multiply():
    both = resolve_preset(
        "grpo",
        {
            "correction": {"kind": "truncate", "cap": 1.1},
            "selection": {"kind": "high_entropy", "fraction": 0.5},
        },
    )
    made, rows, _ = weights_of(both)
    numbers, mask = rows.numbers, rows.mask
    threshold = torch.quantile(numbers["entropy"][mask].double(), 0.5)
    plain = (numbers["old"] - numbers["behaviour"]).exp().clamp(max=1.1)
    expected = torch.where(numbers["entropy"] >= threshold, plain, 0.0)
    torch.testing.assert_close(made.weights[mask], expected[mask])
    assert (made.weights[~mask] == 1).all()
    assert made.metrics["selection/kept"] == pytest.approx(0.5, abs=0.02)


def test_clip_cov_spares_what_is_clipped_anyhow_and_hangs_on_the_seed_alone():
    settings = resolve_preset("clip_cov", {"selection": {"fraction": 0.1, "low": -9.0, "high": 9.0}})
    first, rows, _ = weights_of(settings, seed=4)
    again, *_ = weights_of(settings, seed=4)
    other, *_ = weights_of(settings, seed=5)
    assert torch.equal(first.weights, again.weights)
    assert not torch.equal(first.weights, other.weights)
    # A row per turn: the same tokens are drawn.
    cut, steps, _ = weights_of(settings, seed=4, layout="step")
    assert torch.equal(first.weights[rows.mask], cut.weights[steps.mask])


def test_kl_cov_charges_its_tokens():
    made, rows, advantages = weights_of(resolve_preset("kl_cov", {"selection": {"fraction": 0.1}}))
    covariance = covariances(rows.numbers["logprobs"][rows.mask], advantages[rows.mask])
    count = int(0.1 * len(covariance))
    largest = torch.zeros(len(covariance), dtype=torch.bool)
    largest[covariance.topk(count).indices] = True
    assert (made.charges[rows.mask] == 1.0).tolist() == largest.tolist()
    assert (made.weights == 1).all()


def test_rejection_keeps_only_episodes_within_all_bounds():
    settings = resolve_preset(
        "grpo",
        {
            "correction": {
                "kind": "reject",
                "reject": [{"level": "sequence", "measure": "k1", "low": -0.1, "high": 0.1}, {"high": 1.3}],
            }
        },
    )
    made, rows, _ = weights_of(settings, layout="step")
    moved = rows.numbers["old"] - rows.numbers["behaviour"]
    for episode in rows.trajectory.unique():
        here = (rows.trajectory == episode)[:, None] & rows.mask
        near = abs(-moved[here].mean()) <= 0.1
        expected = [float(near and math.exp(d) <= 1.3) for d in moved[here].tolist()]
        assert made.weights[here].tolist() == expected


def every_second(tokens):
    """A selection of a user's: tokens at even places of their rows."""
    return (torch.arange(tokens.mask.shape[1]) % 2 == 0).float().expand(tokens.mask.shape)


def endless(tokens):
    """A weight that nobody can compute with."""
    return torch.full(tokens.mask.shape, math.inf)


def too_few(tokens):
    """Not a weight for each token."""
    return torch.ones(3)


def custom(function):
    return resolve_preset("grpo", {"selection": {"kind": "custom", "function": f"{__name__}:{function}"}})


def test_a_selection_of_the_users():
    made, rows, _ = weights_of(custom("every_second"))
    even = (torch.arange(rows.mask.shape[1]) % 2 == 0).float().expand(rows.mask.shape)
    assert torch.equal(made.weights[rows.mask], even[rows.mask])


@pytest.mark.parametrize(("function", "error"), [("endless", InvalidNumberError), ("too_few", PluginError)])
def test_a_selection_of_the_users_is_looked_at(function, error):
    with pytest.raises(error, match=r"algorithm.selection.function|not finite"):
        weights_of(custom(function))


def test_what_a_selection_reads_must_be_there():
    rows = random_case(1).rows()
    tokens = rows.step_tokens(torch.zeros(rows.mask.shape))
    bare = StepTokens(*(getattr(tokens, name) for name in list(StepTokens.__slots__)[:-1]))
    with pytest.raises(ValueError, match="'entropy', which is missing"):
        prepare_step(resolve_preset("high_entropy", {}), bare)


@pytest.mark.parametrize(
    ("selection", "rejects", "reads"),
    [
        ({"kind": "none"}, False, False),
        ({"kind": "kl_cov"}, False, True),
        ({"kind": "second_moment"}, False, True),
        ({"kind": "second_moment", "policy": "old"}, False, False),
        ({"kind": "second_moment", "policy": "old"}, True, True),
    ],
)
def test_the_policy_as_it_is_at_each_step_is_asked_where_something_reads_it(selection, rejects, reads):
    algorithm = {"selection": selection} | ({"correction": "opsm"} if rejects else {})
    assert resolve_preset("grpo", algorithm).prepares_from_current is reads
