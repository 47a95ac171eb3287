from dataclasses import replace

import pytest
import torch

from rollgym.trainer.algorithms.batch import RowBatch, TokenStream, TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import OverlongSettings, RewardSettings
from rollgym.trainer.algorithms.rewards import (
    discounted_return,
    discounted_turn_returns,
    placed_rewards,
    turn_charges,
    turn_rewards,
)

BATCH = TrajectoryBatch(
    groups=[0, 0],
    rewards=[[-0.2, 3.0], [0.5]],
    format_penalties=[[-0.2, 0.0], [0.0]],
    valid=[[False, True], [True]],
    anchors=[[None, None], [None]],
    tokens=[[6, 3], [2]],
)


def test_rewards_are_the_environments_unless_told_otherwise():
    assert turn_rewards(RewardSettings(), BATCH) == [[-0.2, 3.0], [0.5]]


@pytest.mark.parametrize(("penalty", "first"), [(0.1, -0.1), (0.0, 0.0)])
def test_penalty_replaces_the_environments_own(penalty, first):
    assert turn_rewards(RewardSettings(invalid_action_penalty=penalty), BATCH) == [[first, 3.0], [0.5]]


def test_turn_rewards_are_scaled_after_all_else():
    assert turn_rewards(RewardSettings(scale=2.0), BATCH) == [[-0.4, 6.0], [1.0]]
    assert turn_rewards(RewardSettings(scale=2.0, turn_high=1.0), BATCH) == [[-0.4, 2.0], [1.0]]


def test_turn_rewards_are_clipped():
    assert turn_rewards(RewardSettings(turn_low=0.0, turn_high=1.0), BATCH) == [[0.0, 1.0], [0.5]]
    assert turn_rewards(RewardSettings(turn_high=1.0), BATCH) == [[-0.2, 1.0], [0.5]]


def test_overlong_penalty_falls_on_the_last_turn():
    overlong = OverlongSettings(max_tokens=10, buffer_tokens=4, penalty=2.0)
    assert turn_rewards(RewardSettings(overlong=overlong), BATCH) == [[-0.2, 1.5], [0.5]]


def test_discounts():
    assert discounted_turn_returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert discounted_return([1.0, 2.0, 4.0], 0.5) == 3.0
    assert discounted_turn_returns([], 0.5) == []
    assert discounted_return([], 0.5) == 0.0


def stream_of(trajectory, turn_index, trajectories=1):
    index = torch.tensor(turn_index)
    rows = RowBatch(torch.tensor(trajectory), index >= 0, index)
    return TokenStream.from_rows(rows, trajectories), rows.mask


def test_a_reward_lies_on_the_last_sampled_token_of_its_turn():
    stream, mask = stream_of([0], [[-1, 0, 0, -1, 1, -1]])
    assert placed_rewards([[2.0, 3.0]], stream, mask).tolist() == [[0, 0, 2, 0, 3, 0]]


def test_rewards_of_turns_in_rows_of_their_own():
    stream, mask = stream_of([1, 0, 1], [[-1, 1, 1], [0, -1, -1], [0, 0, -1]], trajectories=2)
    assert placed_rewards([[5.0], [2.0, 3.0]], stream, mask).tolist() == [[0, 0, 3], [5, 0, 0], [0, 2, 0]]


def test_a_reward_that_no_token_can_carry_is_refused():
    stream, mask = stream_of([0], [[0, 0]])
    with pytest.raises(ValueError, match="turn 1 of trajectory 0"):
        placed_rewards([[0.0, 1.0]], stream, mask)


def test_a_trajectory_without_tokens_and_reward_has_no_place_in_the_stream():
    stream, mask = stream_of([1], [[0, 0]], trajectories=2)
    assert placed_rewards([[0.0], [1.0]], stream, mask).tolist() == [[0, 1]]
    assert stream.gather(mask.float()).tolist() == [[0, 0], [1, 1]]


def test_what_was_cut_off_is_charged_nothing_beside_its_reward():
    settings = RewardSettings(truncated_reward=-1.0, penalty_in="return", invalid_action_penalty=0.5)
    cut = replace(BATCH, truncated=[True, False], valid=[[False, False], [False]])
    assert turn_rewards(settings, cut) == [[0.0, -1.0], [0.5]]
    assert turn_charges(settings, cut) == [[0.0, 0.0], [-0.5]]
    assert turn_charges(settings, BATCH) == [[-0.5, 0.0], [0.0]], "where nobody asks, nothing was cut off"


@pytest.mark.parametrize("factor", [0.0, 0.25, 1.0])
def test_what_was_cut_off_pays_the_share_of_its_penalties_that_it_earns_of_its_rewards(factor):
    cut = replace(BATCH, truncated=[True, False], valid=[[False, False], [False]])
    common = {"truncated_scale": factor, "invalid_action_penalty": 0.5, "scale": 2.0}
    charges = turn_charges(RewardSettings(penalty_in="return", **common), cut)
    assert charges == [[-factor, -factor], [-1.0]]
    # Without a discount the two ways of charging are one.
    apart = turn_rewards(RewardSettings(penalty_in="return", **common), cut)
    within = turn_rewards(RewardSettings(penalty_in="reward", **common), cut)
    for rewards, charged, expected in zip(apart, charges, within, strict=True):
        assert [reward + charge for reward, charge in zip(rewards, charged, strict=True)] == pytest.approx(
            expected
        )
