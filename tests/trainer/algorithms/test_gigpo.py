import statistics
from difflib import SequenceMatcher

import pytest

from rollgym.trainer.algorithms.gigpo import anchor_groups, gigpo_advantages


def test_equal_keys_of_different_prompt_groups_never_meet():
    anchors = anchor_groups([["a", "b"], ["a"], ["a"]], [0, 0, 1])
    assert anchors.tolist() == [0, 1, 0, 2]


def test_a_step_without_a_key_is_alone():
    anchors = anchor_groups([[None, "a"], [None, "a"]], [0, 0])
    assert anchors.tolist() == [0, 1, 2, 1]


def test_similar_keys_join_the_first_anchor_group_whose_first_member_is_close():
    # 9 of 10 letters in common: ratio 0.9. The third differs from the first in two, but from the second in one.
    keys = ["aaaaaaaaaa", "aaaaaaaaab", "aaaaaaaabb"]
    assert anchor_groups([keys], [0], similarity=0.9).tolist() == [0, 0, 1]
    assert anchor_groups([keys], [0], similarity=0.8).tolist() == [0, 0, 0]
    assert anchor_groups([keys], [0]).tolist() == [0, 1, 2]
    assert anchor_groups([keys[::-1]], [0], similarity=0.9).tolist() == [0, 0, 1]


def test_similarity_stays_inside_the_prompt_group():
    assert anchor_groups([["same"], ["same"]], [0, 1], similarity=0.5).tolist() == [0, 1]


def test_step_weight_scales_the_step_part_only():
    rewards, anchors = [[0, 1], [0, 0]], anchor_groups([["s", "t"], ["s", "t"]], [0, 0])
    without = gigpo_advantages(rewards, [0, 0], anchors, step_weight=0.0)
    once = gigpo_advantages(rewards, [0, 0], anchors, step_weight=1.0, turn_discount=0.5)
    twice = gigpo_advantages(rewards, [0, 0], anchors, step_weight=2.0, turn_discount=0.5)
    assert without == [[0.5, 0.5], [-0.5, -0.5]]
    assert once == [[0.75, 1.0], [-0.75, -1.0]]
    assert twice == [[1.0, 1.5], [-1.0, -1.5]]


@pytest.mark.parametrize(
    ("raw", "count_steps", "rewards", "expected"),
    [
        (False, False, [0, 1], [0.0, 0.0]),
        (True, False, [0, 1], [1.0, 1.0]),
        # verl-agent counts samples: an episode of two steps is a group of two equal scores.
        (True, True, [0, 1], [0.0, 0.0]),
        (True, True, [1], [1.0]),
        (False, True, [1], [0.0]),
    ],
)
def test_an_episode_alone_in_its_group(raw, count_steps, rewards, expected):
    anchors = anchor_groups([["s", "t"][: len(rewards)]], [0])
    result = gigpo_advantages([rewards], [0], anchors, singleton_raw=raw, count_steps=count_steps)
    assert result == [expected]


def test_similarity_asks_how_like_a_key_is_to_the_first_member_and_not_the_other_way_round():
    first, second = "baaba", "abaaa"
    assert SequenceMatcher(None, first, second).ratio() == 0.8
    assert SequenceMatcher(None, second, first).ratio() == 0.6
    assert anchor_groups([[second, first]], [0], similarity=0.7).tolist() == [0, 0]
    assert anchor_groups([[first, second]], [0], similarity=0.7).tolist() == [0, 1]


@pytest.mark.parametrize("normalise_std", [False, True])
def test_charges_are_taken_off_the_step_that_is_charged_alone(normalise_std):
    # verl-agent: the samples of a group are its steps, each with the episode's score less its own penalty.
    rewards, charges = [[0.0, 1.0], [0.0, 0.0]], [[-0.5, 0.0], [0.0, 0.0]]
    anchors = anchor_groups([["s", "t"], ["s", "u"]], [0, 0])
    result = gigpo_advantages(
        rewards,
        [0, 0],
        anchors,
        charges=charges,
        turn_discount=0.5,
        normalise_std=normalise_std,
        epsilon=1e-9,
    )
    scores = [1 - 0.5, 1.0, 0.0, 0.0]
    mean, std = statistics.mean(scores), statistics.stdev(scores) if normalise_std else 1.0
    # Returns in "s": 0.5 * 1 - 0.5 = 0 and 0; "t" and "u" are alone.
    assert result[0] == pytest.approx([(scores[0] - mean) / std, (scores[1] - mean) / std])
    assert result[1] == pytest.approx([(scores[2] - mean) / std, (scores[3] - mean) / std])
    whole = gigpo_advantages(
        rewards, [0, 0], anchors, charges=charges, turn_discount=0.5, count_steps=False, step_weight=0.0
    )
    assert whole == [[0.25, 0.25], [-0.25, -0.25]], (
        "over trajectories an episode pays once, and all its turns"
    )


@pytest.mark.parametrize("normalise_std", [False, True])
def test_equal_episodes_give_zero(normalise_std):
    anchors = anchor_groups([["s", "t"], ["s", "t"]], [0, 0])
    result = gigpo_advantages([[0, 1], [0, 1]], [0, 0], anchors, normalise_std=normalise_std)
    assert result == [[0, 0], [0, 0]]
