"""Which episodes of a group are trained on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import EpisodeSettings
from rollgym.trainer.algorithms.selection import choose_episodes, resampled_on_correct
from rollgym.trainer.core.errors import PluginError


def batch_of(returns, groups, *, valid=None, truncated=()):
    count = len(returns)
    return TrajectoryBatch(
        groups,
        [[value] for value in returns],
        [[0.0]] * count,
        valid or [[True]] * count,
        [[None]] * count,
        [[1]] * count,
        truncated=truncated,
    )


def chosen(settings, batch):
    read = TypeAdapter(EpisodeSettings).validate_python(settings)
    return choose_episodes(read, batch, [sum(turns) for turns in batch.rewards])


def test_successes_and_failures_keep_their_shares():
    # rStar2-Agent 3.2: 3 of 8 succeed, 4 are kept: round(1.5) = 2 successes, the cleanest; the first two failures.
    returns = [1, 0, 1, 0, 0, 1, 0, 0]
    penalties = [0.5, 0, 0.0, 0, 0, 0.2, 0, 0]
    assert resampled_on_correct(returns, penalties, 4) == [1, 2, 3, 5]


@pytest.mark.parametrize(
    ("returns", "kept"),
    [([1, 0, 0, 0, 0, 0], [0, 1]), ([1, 1, 1, 1, 1, 0], [0, 5]), ([1] * 6, [0, 1]), ([1, 0], [0, 1])],
)
def test_of_each_at_least_one_stays(returns, kept):
    assert resampled_on_correct(returns, [0.0] * len(returns), 2) == kept


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=20), st.integers(1, 20), st.integers(0, 5))
def test_as_many_are_kept_as_there_should_be(returns, size, at_least):
    kept = resampled_on_correct(returns, [0.0] * len(returns), size, at_least=at_least)
    assert len(kept) == len(set(kept)) == min(size, len(returns))


def test_groups_are_resampled_each_by_itself():
    batch = batch_of(
        [1.0, 1.0, 0.0, 1.0, 0.0], [0, 0, 0, 1, 1], valid=[[False], [True], [True], [True], [True]]
    )
    choice = chosen({"kind": "resample_on_correct", "size": 2}, batch)
    assert choice.kept == [False, True, True, True, True]
    assert not choice.in_statistics


def test_episodes_that_were_cut_off_still_count_in_the_statistics():
    batch = batch_of([1.0, 0.0], [0, 0], truncated=[True, False])
    assert chosen({"kind": "finished"}, batch).kept == [False, True]
    assert chosen({"kind": "finished"}, batch).in_statistics
    assert not chosen({"kind": "finished", "in_statistics": False}, batch).in_statistics
    assert chosen({"kind": "all"}, batch).kept == [True, True]


def winners(batch):
    """A choice of a user's."""
    return [sum(turns) > 0 for turns in batch.rewards]


def too_few(batch):
    """Not a flag for each."""
    return [True]


def test_a_choice_of_the_users():
    batch = batch_of([1.0, 0.0, 1.0], [0, 0, 0])
    assert chosen({"kind": "custom", "function": f"{__name__}:winners"}, batch).kept == [True, False, True]
    with pytest.raises(PluginError, match="3 truth values"):
        chosen({"kind": "custom", "function": f"{__name__}:too_few"}, batch)


def test_a_batch_of_some_episodes_alone():
    batch = batch_of([1.0, 0.0, 0.5], [3, 4, 5], truncated=[True, False, True])
    some = batch.select([2, 0])
    assert (some.groups, some.rewards, some.truncated) == ([5, 3], [[0.5], [1.0]], [True, True])
