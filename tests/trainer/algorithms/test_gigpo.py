import pytest

from trainer.algorithms.gigpo import anchor_groups, gigpo_advantages


def test_equal_keys_of_different_prompt_groups_never_meet():
    anchors = anchor_groups([["a", "b"], ["a"], ["a"]], [0, 0, 1])
    assert anchors.cluster.tolist() == [0, 1, 0, 2]
    assert anchors.singletons == 2


def test_a_step_without_a_key_is_alone():
    anchors = anchor_groups([[None, "a"], [None, "a"]], [0, 0])
    assert anchors.cluster.tolist() == [0, 1, 2, 1]


def test_similar_keys_join_the_first_anchor_group_whose_first_member_is_close():
    # 9 of 10 letters in common: ratio 0.9. The third differs from the first in two, but from the second in one.
    keys = ["aaaaaaaaaa", "aaaaaaaaab", "aaaaaaaabb"]
    assert anchor_groups([keys], [0], similarity=0.9).cluster.tolist() == [0, 0, 1]
    assert anchor_groups([keys], [0], similarity=0.8).cluster.tolist() == [0, 0, 0]
    assert anchor_groups([keys], [0]).cluster.tolist() == [0, 1, 2]
    assert anchor_groups([keys[::-1]], [0], similarity=0.9).cluster.tolist() == [0, 0, 1]


def test_similarity_stays_inside_the_prompt_group():
    assert anchor_groups([["same"], ["same"]], [0, 1], similarity=0.5).cluster.tolist() == [0, 1]


def test_step_weight_scales_the_step_part_only():
    rewards, anchors = [[0, 1], [0, 0]], anchor_groups([["s", "t"], ["s", "t"]], [0, 0])
    without = gigpo_advantages(rewards, [0, 0], anchors, step_weight=0.0)
    once = gigpo_advantages(rewards, [0, 0], anchors, step_weight=1.0, turn_discount=0.5)
    twice = gigpo_advantages(rewards, [0, 0], anchors, step_weight=2.0, turn_discount=0.5)
    assert without == [[0.5, 0.5], [-0.5, -0.5]]
    assert once == [[0.75, 1.0], [-0.75, -1.0]]
    assert twice == [[1.0, 1.5], [-1.0, -1.5]]


@pytest.mark.parametrize(("raw", "expected"), [(False, [0.0, 0.0]), (True, [1.0, 1.0])])
def test_an_episode_alone_in_its_group(raw, expected):
    anchors = anchor_groups([["s", "t"]], [0])
    assert gigpo_advantages([[0, 1]], [0], anchors, singleton_raw=raw) == [expected]


@pytest.mark.parametrize("normalise_std", [False, True])
def test_equal_episodes_give_zero(normalise_std):
    anchors = anchor_groups([["s", "t"], ["s", "t"]], [0, 0])
    result = gigpo_advantages([[0, 1], [0, 1]], [0, 0], anchors, normalise_std=normalise_std)
    assert result == [[0, 0], [0, 0]]
