"""Numbers of turns become numbers of episodes, in the way that the environment names."""

import pytest

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.rollout.episode_metrics import EpisodeMetrics

HOW = {"fuel": "sum", "speed": "mean", "best": "max", "worst": "min", "place": "last"}


def test_each_aggregates_as_the_environment_says():
    metrics = EpisodeMetrics(HOW)
    for value in (3, 1.0, 2):
        metrics.add({"metrics": dict.fromkeys([*HOW, "unnamed"], value)})
    expected = {"fuel": 6.0, "speed": 2.0, "best": 3.0, "worst": 1.0, "place": 2.0, "unnamed": 2.0}
    assert metrics.totals() == expected


def test_only_numbers_count_and_only_where_they_came():
    metrics = EpisodeMetrics({})
    for info in (
        {},
        {"metrics": None},
        {"metrics": {"a": "x", "b": None, "hit": True}},
        {"metrics": {"late": 1}},
    ):
        metrics.add(info)
    assert metrics.totals() == {"hit": 1.0, "late": 1.0}


def test_an_unknown_way_is_told():
    with pytest.raises(
        ValueError, match="'speed' aggregates by 'median'; known are last, sum, mean, max, min"
    ):
        EpisodeMetrics({"speed": "median"})


@pytest.mark.parametrize("how", [["fuel"], "last", 5, {"fuel": ["last"]}, {"fuel": None}])
def test_ways_that_are_none_are_told(how):
    with pytest.raises(ConfigError, match=r"metadata\['metrics'\] must name how|'fuel' aggregates by"):
        EpisodeMetrics(how)
