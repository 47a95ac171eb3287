"""Rows are views of the record: same tokens, same log-probabilities, each reply trained on once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.learn.batches import step_rows, trajectory_rows
from rollgym.trainer.records.trajectory import Segment, Trajectory, Turn
from rollgym.trainer.tasks.task import Task


def trajectory_of(replies: list[list[int]], *, break_at: set[int] = frozenset()) -> Trajectory:
    """An episode whose prompts are two tokens a turn; a turn in `break_at` opens a new segment."""
    trajectory = Trajectory(Task(0, "Any-v0", 0), member=0)
    for number, reply in enumerate(replies):
        if number == 0 or number in break_at:
            trajectory.segments.append(Segment())
        segment = trajectory.segments[-1]
        segment.append_context([100, 101])
        start = len(segment.ids)
        segment.append_action(reply, [-0.5 * (number + 1)] * len(reply), [number] * len(reply), number)
        trajectory.turns.append(
            Turn(len(trajectory.segments) - 1, start, len(segment.ids), "seen", "said", reward=1.0)
        )
    return trajectory


episodes = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), min_size=1, max_size=6)


@given(replies=episodes, breaks=st.sets(st.integers(1, 5)))
def test_both_builders_train_on_every_sampled_token_once(replies, breaks):
    trajectory = trajectory_of(replies, break_at=breaks)
    sampled = [(number, token) for number, reply in enumerate(replies) for token in reply]
    for build in (trajectory_rows, step_rows):
        rows = build(7, trajectory)
        seen = [
            (turn, token)
            for row in rows
            for token, used, turn in zip(row.ids, row.mask, row.turn_index, strict=True)
            if used
        ]
        assert seen == sampled
        for row in rows:
            assert row.trajectory == 7
            assert (
                len(row.ids)
                == len(row.mask)
                == len(row.behaviour_logprobs)
                == len(row.versions)
                == len(row.turn_index)
            )
            assert all(
                value == 0.0 for value, used in zip(row.behaviour_logprobs, row.mask, strict=True) if not used
            )


@given(replies=episodes)
def test_an_unbroken_episode_is_one_row_or_one_row_a_turn(replies):
    trajectory = trajectory_of(replies)
    assert len(trajectory_rows(0, trajectory)) == 1
    steps = step_rows(0, trajectory)
    assert len(steps) == len(replies)
    # What the policy read at its last turn is all that came before.
    assert steps[-1].ids == trajectory.segments[0].ids


@given(replies=episodes)
def test_tensors_hold_what_the_lists_do(replies):
    for build in (trajectory_rows, step_rows):
        for row in build(0, trajectory_of(replies)):
            tensors = row.tensors()
            assert torch.equal(tensors.ids, torch.tensor(row.ids))
            assert torch.equal(tensors.mask, torch.tensor(row.mask))
            assert torch.equal(row.behaviour(), torch.tensor(row.behaviour_logprobs))
            assert torch.equal(row.turns(), torch.tensor(row.turn_index))
            assert torch.equal(row.sampled_by(), torch.tensor(row.versions))


def test_versions_of_an_episode_that_spans_updates():
    assert trajectory_of([[1], [2], [3]]).oldest_version == 0
    assert Trajectory(Task(0, "Any-v0", 0), 0).oldest_version == -1


def test_a_reply_without_all_its_logprobs_is_refused():
    with pytest.raises(ValueError, match="3 tokens came with 2 log-probabilities"):
        Segment().append_action([1, 2, 3], [0.0, 0.0], [0, 0, 0], turn=0)
