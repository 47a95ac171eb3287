import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from trainer.algorithms.filters import filter_groups, refills
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


# Solved: group 3 half, group 1 all, group 2 none, group 4 (one member) all.
SOLVED = [False, True, False, True, True, True, False]


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [({}, [3]), ({"above": 0.5}, []), ({"below": 0.5}, []), ({"above": 0.4, "below": 0.6}, [3])],
)
def test_groups_are_kept_by_how_many_of_them_are_solved(bounds, kept):
    settings = TypeAdapter(FilterSettings).validate_python({"kind": "success_range", **bounds})
    result = filter_groups(settings, GROUPS, RETURNS, SOLVED)
    assert result.kept == kept
    assert result.dropped == {group: "success_range" for group in (3, 1, 2, 4) if group not in kept}


def test_only_filters_that_judge_each_group_by_itself_refill_and_may_be_told_not_to():
    def of(**settings):
        return refills(TypeAdapter(FilterSettings).validate_python(settings))

    assert of(kind="zero_variance")
    assert of(kind="success_range")
    assert not of(kind="zero_variance", refill=False)
    assert not any(of(kind=kind) for kind in ("none", "top_fraction", "top_p", "min_p"))
    with pytest.raises(ValueError, match="max_rounds is read with refill: true only"):
        of(kind="zero_variance", refill=False, max_rounds=3)
    with pytest.raises(ValueError, match="above must be smaller than below"):
        of(kind="success_range", above=0.5, below=0.5)


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
