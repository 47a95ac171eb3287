"""Losses of preferences and of distillation: golden numbers of TRL, papers' formulas, and what must not change them."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollgym.trainer.algorithms.distillation import divergence, sampled_reverse_kl, with_rest
from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.algorithms.preference import Replies, bradley_terry_loss, paired_loss, unpaired_loss

RECORDED = Path(__file__).parents[3] / "benchmarks" / "results" / "trl_losses.json"
"""Written by peers/pipelines/trl_losses.py, which runs TRL."""
PAIRED = ("dpo", "robust", "hinge", "ipo", "orpo", "simpo")


def golden() -> dict:
    return json.loads(RECORDED.read_text())["golden"]


def replies(case: dict, side: int, *, grad: bool = False) -> Replies:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([row[side] for row in case[name]], dtype=torch.float64)

    return Replies(column("policy").requires_grad_(grad), column("tokens"), column("reference"))


@pytest.mark.parametrize("name", PAIRED)
def test_losses_of_pairs_are_those_of_trl(name):
    case = golden()["preferences"][name]
    settings = PreferenceLossSettings.model_validate(case["settings"])
    result = paired_loss(settings, replies(case, 0), replies(case, 1))
    assert float(result.loss.detach()) == pytest.approx(case["loss"], rel=1e-6, abs=1e-6)


def test_kto_is_that_of_trl():
    case = golden()["preferences"]["kto"]
    settings = PreferenceLossSettings.model_validate(case["settings"])
    good = torch.tensor(case["good"])
    result = unpaired_loss(settings, replies(case, 0), good, replies(case, 1))
    assert float(result.loss.detach()) == pytest.approx(case["loss"], rel=1e-6, abs=1e-6)


def test_every_case_was_equal_to_trl_in_loss_and_gradient():
    recorded = json.loads(RECORDED.read_text())
    assert {each["case"].split()[0] for each in recorded["cases"]} == {
        "sft",
        *PAIRED,
        "kto",
        "reward",
        "distill",
    }
    for each in recorded["cases"]:
        # In float32 a loss of 20 has its last digit at 2e-6.
        assert each["loss_difference"] <= recorded["tolerance"] * max(1.0, each["loss"]), each
        assert each["gradient_difference"] <= recorded["tolerance"], each


@pytest.mark.parametrize("number", range(5))
def test_divergences_and_their_gradients_are_those_of_trl(number):
    case = golden()["divergences"][number]
    student = torch.tensor(case["student"], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor(case["teacher"], dtype=torch.float64)
    beta, heat = case["beta"], case["temperature"]
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    loss = divergence(
        (student / heat).log_softmax(-1), (teacher / heat).log_softmax(-1), kind, beta or 0.5
    ).mean()
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(loss.detach()) == pytest.approx(case["loss"], rel=1e-6, abs=1e-6)
    assert torch.allclose(gradient, torch.tensor(case["gradient"], dtype=torch.float64), atol=1e-6)


def one(logprob: float, tokens: int = 1, reference: float = 0.0, *, grad: bool = False) -> Replies:
    return Replies(
        torch.tensor([logprob], dtype=torch.float64, requires_grad=grad),
        torch.tensor([float(tokens)], dtype=torch.float64),
        torch.tensor([reference], dtype=torch.float64),
    )


def test_dpo_by_hand():
    """-log sigmoid(0.1 * ((-2 + 3) - (-5 + 4))) = -log sigmoid(0.2)."""
    result = paired_loss(PreferenceLossSettings(), one(-2, reference=-3), one(-5, reference=-4))
    assert float(result.loss) == pytest.approx(math.log1p(math.exp(-0.2)))
    assert (float(result.chosen), float(result.rejected)) == pytest.approx((0.1, -0.1))


def test_ipo_is_least_at_half_the_inverse_of_its_strength():
    settings = PreferenceLossSettings(kind="ipo", beta=0.25, average=False)
    assert float(paired_loss(settings, one(-1), one(-3)).loss) == pytest.approx(0.0)
    averaged = PreferenceLossSettings(kind="ipo", beta=0.25)
    assert float(paired_loss(averaged, one(-2, 2), one(-9, 3)).loss) == pytest.approx(0.0)


def test_odds_near_certainty_are_finite_with_their_gradient():
    chosen, rejected = one(-1e-12, grad=True), one(-700.0, grad=True)
    loss = paired_loss(PreferenceLossSettings(kind="orpo"), chosen, rejected).loss
    gradients = torch.autograd.grad(loss, (chosen.logprobs, rejected.logprobs))
    assert all(bool(each.isfinite().all()) for each in (loss, *gradients))


def test_smoothing_half_way_is_refused_and_unread_numbers_too():
    with pytest.raises(ValidationError, match=r"less than 0\.5"):
        PreferenceLossSettings(label_smoothing=0.5)
    with pytest.raises(ValidationError, match="margin is read by kind simpo only, not by 'dpo'"):
        PreferenceLossSettings(margin=2.0)


@given(
    st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), min_size=1, max_size=6), st.sampled_from(PAIRED)
)
def test_order_of_pairs_changes_nothing(pairs, kind):
    def loss(order):
        sides = [
            Replies(
                torch.tensor([pair[side] for pair in order], dtype=torch.float64),
                torch.full((len(order),), 4.0, dtype=torch.float64),
                torch.zeros(len(order), dtype=torch.float64),
            )
            for side in (0, 1)
        ]
        return float(paired_loss(PreferenceLossSettings(kind=kind), *sides).loss)

    assert loss(pairs) == pytest.approx(loss(pairs[::-1]), rel=1e-9, abs=1e-9)


def test_a_reward_models_loss_is_that_of_the_order():
    chosen, rejected = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 3.0])
    expected = (math.log1p(math.exp(-1.0)) + math.log1p(math.exp(1.0))) / 2
    assert float(bradley_terry_loss(chosen, rejected)) == pytest.approx(expected)
    margins = torch.tensor([1.0, -1.0])
    assert float(bradley_terry_loss(chosen, rejected, margins)) == pytest.approx(math.log(2.0))
    assert float(bradley_terry_loss(chosen, rejected, margins, 0.1)) == pytest.approx(math.log(2.0) + 1.3)


TABLES = st.lists(st.lists(st.floats(-8, 8), min_size=5, max_size=5), min_size=2, max_size=2)
KINDS = ("forward_kl", "reverse_kl", "jsd", "skewed_forward_kl", "skewed_reverse_kl")


@given(TABLES, st.sampled_from(KINDS), st.floats(0.05, 0.95))
def test_divergences_are_zero_of_equals_and_never_negative(tables, kind, weight):
    student, teacher = (torch.tensor([row], dtype=torch.float64).log_softmax(-1) for row in tables)
    assert float(divergence(student, teacher, kind, weight)) >= -1e-12
    assert float(divergence(teacher, teacher, kind, weight)) == pytest.approx(0.0, abs=1e-12)


@given(TABLES)
def test_a_part_of_the_vocabulary_is_a_lower_bound(tables):
    student, teacher = (torch.tensor([row], dtype=torch.float64).log_softmax(-1) for row in tables)
    likeliest = teacher.topk(2, dim=-1).indices
    part = divergence(
        with_rest(student.gather(-1, likeliest)), with_rest(teacher.gather(-1, likeliest)), "forward_kl"
    )
    assert -1e-6 <= float(part) <= float(divergence(student, teacher, "forward_kl")) + 1e-6


def test_sampled_estimates_have_the_gradient_of_the_reverse_kl():
    """The mean over what the student draws, each token weighed by its probability, is exact over a whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(7, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(-1)
    student = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(
        divergence(student[None], teacher[None], "reverse_kl").sum(), logits, retain_graph=True
    )
    own = student.detach()
    mask = torch.ones(7, dtype=torch.bool)
    losses = sampled_reverse_kl(student, own, teacher, mask, largest_ratio=5.0)
    (estimated,) = torch.autograd.grad((own.exp() * losses).sum(), logits)
    assert torch.allclose(exact, estimated, atol=1e-12)


def test_a_token_of_an_older_student_is_weighed_and_the_weight_bounded():
    now, behaviour = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -9.0]])
    losses = sampled_reverse_kl(
        now, behaviour, torch.tensor([[-2.0, -2.0]]), torch.ones(1, 2, dtype=torch.bool), 5.0
    )
    assert losses[0].tolist() == pytest.approx([-math.exp(0.5) * -1.0 * -1.0, -5.0 * -1.0 * -1.0])
