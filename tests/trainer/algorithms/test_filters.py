import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from trainer.algorithms.filters import filter_groups
from trainer.algorithms.settings import FilterSettings

# Deviations: group 3: 0.71, group 1: 0.35, group 2: none, group 4: one member.
GROUPS = [3, 1, 2, 4, 3, 1, 2]
RETURNS = [0.0, 0.5, 0.1, 9.0, 1.0, 1.0, 0.1]


def choose(groups=GROUPS, returns=RETURNS, **settings):
    return filter_groups(TypeAdapter(FilterSettings).validate_python(settings), groups, returns)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"kind": "none"}, [3, 1, 2, 4]),
        ({"kind": "zero_variance"}, [3, 1, 4]),
        ({"kind": "top_fraction"}, [3]),
        ({"kind": "top_fraction", "fraction": 0.5}, [3, 1]),
        ({"kind": "top_fraction", "fraction": 0.74}, [3, 1]),
        ({"kind": "top_fraction", "fraction": 0.01}, [3]),
        ({"kind": "top_p", "mass": 0.6}, [3]),
        ({"kind": "top_p", "mass": 0.9}, [3, 1]),
        ({"kind": "min_p", "fraction": 0.4}, [3, 1]),
        ({"kind": "min_p", "fraction": 0.6}, [3]),
    ],
)
def test_kept_groups(settings, kept):
    result = choose(**settings)
    assert result.kept == kept
    assert result.dropped == {group: settings["kind"] for group in (3, 1, 2, 4) if group not in kept}


def test_noise_of_equal_returns_is_no_variance():
    noisy = [0.1 + 0.2, 0.3, 0.3]
    assert choose([0, 0, 0], noisy, kind="zero_variance").kept == []


@pytest.mark.parametrize("kind", ["top_p", "min_p"])
def test_nothing_is_kept_where_no_group_differs(kind):
    assert choose([0, 0, 1, 1], [1.0, 1.0, 0.0, 0.0], kind=kind).kept == []


def test_no_groups():
    assert choose([], [], kind="zero_variance").kept == []


@given(
    returns=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=8, max_size=8),
    kind=st.sampled_from(["none", "zero_variance", "top_fraction", "top_p", "min_p"]),
)
def test_every_group_is_kept_or_dropped(returns, kind):
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    result = choose(groups, returns, kind=kind)
    assert sorted([*result.kept, *result.dropped]) == [0, 1, 2, 3]
    if result.dropped and result.kept and kind != "zero_variance":
        assert min(result.std[group] for group in result.kept) >= max(result.std[g] for g in result.dropped)
