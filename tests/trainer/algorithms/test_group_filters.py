import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.credit import select_groups
from rollgym.trainer.algorithms.group_filters import FilterSettings
from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.algorithms.selection import filter_groups, refills

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


LENGTHS = [1, 9, 4, 2, 3, 7, 4]
"""Mean lengths: group 3: 2, group 1: 8, group 2: 4, group 4: 2."""


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        # RAGEN's rollout_filter.py; means: group 3: 0.5, group 1: 0.75, group 2: 0.1, group 4: 9; sums 1, 1.5, 0.2, 9.
        ({"kind": "top_fraction", "by": "mean", "fraction": 0.5}, [1, 4]),
        ({"kind": "top_fraction", "by": "mean", "fraction": 0.5, "keep": "smallest"}, [3, 2]),
        ({"kind": "top_fraction", "by": "length", "fraction": 0.5}, [1, 2]),
        ({"kind": "top_count", "by": "sum", "count": 1}, [4]),
        ({"kind": "top_count", "count": 9}, [3, 1, 2, 4]),
        ({"kind": "top_count", "count": 9, "include_zero": False}, [3, 1]),
        ({"kind": "min_p", "by": "length", "fraction": 0.5}, [1, 2]),
        ({"kind": "min_p", "by": "length", "fraction": 0.49, "keep": "smallest"}, [3, 2, 4]),
        # Softmax of 0.71, 0.35, 0, 0: shares 0.37, 0.26, 0.18, 0.18.
        ({"kind": "top_p", "shares": "softmax", "mass": 0.3}, [3]),
        ({"kind": "top_p", "shares": "softmax", "mass": 0.6}, [3, 1]),
        ({"kind": "top_p", "shares": "softmax", "mass": 1.0}, [3, 1, 2, 4]),
        ({"kind": "top_p", "shares": "softmax", "mass": 0.5, "keep": "smallest"}, [2, 4]),
        ({"kind": "top_p", "by": "mean", "mass": 0.8}, [4]),
        # ROLL's difficulty_mask: the mean of the group within bounds.
        ({"kind": "score_range", "above": 0.1, "below": 0.7}, [3]),
        ({"kind": "score_range", "above": -1.0, "below": 10.0}, [3, 1, 2, 4]),
    ],
)
def test_groups_ranked_by_other_scores(settings, kept):
    read = TypeAdapter(FilterSettings).validate_python(settings)
    assert filter_groups(read, GROUPS, RETURNS, lengths=LENGTHS).kept == kept


def longest(batch):
    """A filter of a user's that sees the batch whole: the group with most sampled tokens."""
    totals = {}
    for group, tokens in zip(batch.groups, batch.tokens, strict=True):
        totals[group] = totals.get(group, 0) + sum(tokens)
    return [max(totals, key=totals.get)]


def test_a_filter_of_the_users_may_see_the_whole_batch():
    batch = TrajectoryBatch([0, 1], [[1.0], [0.0]], [[0.0]] * 2, [[True]] * 2, [[None]] * 2, [[3], [8]])
    settings = resolve_preset(
        "grpo", {"filter": {"kind": "custom", "function": f"{__name__}:longest", "sees": "batch"}}
    )
    assert select_groups(settings, batch).kept == [1]
