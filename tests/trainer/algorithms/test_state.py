"""What is remembered between steps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.algorithms.advantage_settings import SpoAdvantage
from rollgym.trainer.algorithms.loss_settings import KLSettings
from rollgym.trainer.algorithms.state import (
    AlgorithmState,
    RunningMoments,
    SuccessEstimate,
    adapted_coefficient,
    kept_share,
    with_outcomes,
)

NUMBERS = st.lists(st.floats(-100, 100), max_size=20)


@given(NUMBERS, NUMBERS)
def test_running_moments_are_those_of_all_values(first, second):
    moments = RunningMoments().taking(first).taking(second)
    both = first + second
    assert moments.count == len(both)
    if both:
        assert moments.mean == pytest.approx(np.mean(both), abs=1e-9)
    if len(both) > 1:
        assert moments.deviation == pytest.approx(np.std(both, ddof=1), abs=1e-6)


@pytest.mark.parametrize(
    ("measured", "factor"),
    [
        (0.1, 1.0),
        (0.11, 1 + 0.1 * 512 / 10_000),
        (9.0, 1 + 0.2 * 512 / 10_000),
        (0.0, 1 - 0.2 * 512 / 10_000),
    ],
)
def test_adaptive_coefficient(measured, factor):
    # verl AdaptiveKLController: target 0.1, horizon 10000
    settings = KLSettings(coefficient=0.2, target=0.1)
    assert adapted_coefficient(0.2, measured, 512, settings) == pytest.approx(0.2 * factor)


def test_a_divergence_that_is_none_adapts_nothing():
    settings = KLSettings(coefficient=0.2, target=0.1, horizon=10)
    assert adapted_coefficient(0.2, math.nan, 64, settings) == 0.2
    assert adapted_coefficient(0.2, 0.0, 10**6, settings) == 0.0, "never below 0"


def test_what_is_kept_of_a_tracker():
    settings = SpoAdvantage(kind="spo")
    assert kept_share(settings, 0.0) == 0.96
    assert kept_share(settings, 0.009) == pytest.approx(2 ** (-0.15))
    assert kept_share(settings, 9.0) == 0.875


def test_trackers_that_were_not_asked_for_longest_go():
    settings = SpoAdvantage(kind="spo", tracked=2)
    state = AlgorithmState()
    for key in ("a", "b", "a", "c"):
        state = with_outcomes(settings, state, [key], [1.0])
    assert list(state.worths) == ["a", "c"]


def test_several_episodes_of_a_task_forget_once():
    settings = SpoAdvantage(kind="spo", rho_low=0.5, rho_high=0.5)
    state = AlgorithmState(worths={"a": SuccessEstimate(2.0, 4.0, 0.0)})
    state = with_outcomes(settings, state, ["a", "a"], [1.0, 7.0])
    assert (state.worths["a"].successes, state.worths["a"].failures) == (3.0, 2.0), (
        "returns count within [0, 1]"
    )


def test_a_state_reads_back_from_what_a_checkpoint_writes(tmp_path):
    state = AlgorithmState(0.3, RunningMoments(3, 1.5, 2.0), 0.7, {"task": SuccessEstimate(1.0, 2.0, 0.1)})
    torch.save(state.as_dict(), tmp_path / "state.pt")
    assert AlgorithmState.from_dict(torch.load(tmp_path / "state.pt", weights_only=True)) == state
    assert AlgorithmState().as_dict() == {}
    assert AlgorithmState.from_dict({}) == AlgorithmState()


@pytest.mark.parametrize(
    "data", [{"moved": 1.0}, {"kl_coefficient": None, "returns": 3, "moved": 0, "worths": {}}]
)
def test_what_is_no_state_is_refused(data):
    with pytest.raises(ValueError, match="another shape"):
        AlgorithmState.from_dict(data)
