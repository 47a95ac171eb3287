"""Intervals against published values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.measuring.statistics import mean_interval, rate_difference, success_rate


def test_wilson_against_newcombe_1998_two_sided_methods_table():
    # Newcombe (1998), Statistics in Medicine 17:857, table I, method 3: 81/263 and 15/148.
    interval = success_rate(81, 263)
    assert (interval.low, interval.high) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    interval = success_rate(15, 148)
    assert (interval.low, interval.high) == (pytest.approx(0.0624, abs=5e-5), pytest.approx(0.1605, abs=5e-5))


def test_difference_against_newcombe_1998_table():
    # Newcombe (1998), Statistics in Medicine 17:873, table II, method 10: 56/70 - 48/80 = 0.2.
    interval = rate_difference(success_rate(48, 80), success_rate(56, 70))
    assert interval.value == pytest.approx(0.2)
    assert (interval.low, interval.high) == (pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))


@given(trials=st.integers(1, 5000), data=st.data())
def test_a_rate_lies_in_its_interval(trials, data):
    interval = success_rate(data.draw(st.integers(0, trials)), trials)
    assert 0.0 <= interval.low <= interval.value <= interval.high <= 1.0


def test_means_refuse_nothing_and_take_one():
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])
    assert mean_interval([2.0]).low == 2.0
