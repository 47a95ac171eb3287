"""One writer of tokens: a prompt extends the segment that it continues, else opens one that says whom it left."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.core.errors import InvalidNumberError
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.records.trajectory import PrefixBreak, Segment, Trajectory
from rollgym.trainer.rollout.recorder import Recorder, RecordError
from rollgym.trainer.tasks.task import Task


def recorder_of(*segments: Segment) -> Recorder:
    return Recorder(Trajectory(Task(0, "Any-v0", 0), 0, segments=list(segments)))


def reply(*ids: int) -> GenerationResult:
    return GenerationResult(list(ids), [-0.25] * len(ids), [3] * len(ids))


def say(recorder: Recorder, prompt: list[int], *ids: int) -> int:
    index = recorder.place(prompt)
    recorder.record(index, reply(*ids), turn=len(recorder.trajectory.turns))
    return index


def test_a_conversation_is_one_segment_with_all_that_was_sampled_marked():
    recorder = recorder_of()
    assert say(recorder, [1, 2], 10, 11) == 0
    assert say(recorder, [1, 2, 10, 11, 3], 12) == 0
    (segment,) = recorder.trajectory.segments
    assert segment == Segment(
        ids=[1, 2, 10, 11, 3, 12],
        action_mask=[False, False, True, True, False, True],
        behaviour_logprobs=[0.0, 0.0, -0.25, -0.25, 0.0, -0.25],
        versions=[-1, -1, 3, 3, -1, 3],
        turn_index=[-1, -1, 0, 0, -1, 0],
    )
    assert recorder.trajectory.prefix_breaks == 0


def test_a_history_may_continue_any_earlier_segment():
    recorder = recorder_of()
    say(recorder, [1, 2], 10)
    assert say(recorder, [7, 8], 20) == 1, "a sub-agent's conversation"
    assert say(recorder, [1, 2, 10, 3], 11) == 0
    assert say(recorder, [7, 8, 20, 3], 21) == 1
    assert [segment.ids for segment in recorder.trajectory.segments] == [[1, 2, 10, 3, 11], [7, 8, 20, 3, 21]]


@pytest.mark.parametrize(
    ("prompt", "parent", "kind"),
    [
        ([1, 2], (0, 2), PrefixBreak.RETRY),
        ([1, 2, 10, 11, 3, 4], (0, 6), PrefixBreak.RETRY),
        ([1, 2, 10, 11, 3, 5], (0, 5), PrefixBreak.BRANCH),
        ([1, 2, 10, 11], (0, 4), PrefixBreak.BRANCH),
        ([1, 2, 10, 3, 4], (0, 3), PrefixBreak.REWRITE),
        ([1, 2, 10], (0, 3), PrefixBreak.REWRITE),
        ([1, 2, 99, 3], (0, 2), PrefixBreak.REWRITE),
        ([1, 5], (0, 1), PrefixBreak.CONVERSATION),
        ([9], None, PrefixBreak.CONVERSATION),
    ],
)
def test_a_prompt_that_continues_nothing_says_whom_it_left_and_why(prompt, parent, kind):
    recorder = recorder_of()
    say(recorder, [1, 2], 10, 11)
    say(recorder, [1, 2, 10, 11, 3, 4], 12)
    assert say(recorder, prompt, 50) == 1
    segment = recorder.trajectory.segments[1]
    assert (segment.parent, segment.prefix_break) == (parent, kind)
    assert segment.ids == [*prompt, 50], "whole in itself"
    assert recorder.trajectory.prefix_breaks == 1


def test_of_two_equal_histories_the_newest_is_continued():
    recorder = recorder_of()
    assert [say(recorder, [1], 10), say(recorder, [1], 10)] == [0, 1]
    assert say(recorder, [1, 10, 2], 11) == 1


def test_calls_side_by_side_never_share_a_segment():
    recorder = recorder_of()
    first, second = recorder.place([1, 2]), recorder.place([1, 2])
    assert (first, second) == (0, 1)
    recorder.record(second, reply(20), 1)
    recorder.record(first, reply(10), 0)
    segments = recorder.trajectory.segments
    assert [segment.ids for segment in segments] == [[1, 2, 10], [1, 2, 20]]
    assert (segments[1].parent, segments[1].prefix_break) == (None, None), (
        "the first that was recorded left nobody"
    )
    assert (segments[0].parent, segments[0].prefix_break) == ((1, 2), PrefixBreak.PARALLEL)
    both = recorder.place([1, 2, 10, 3]), recorder.place([1, 2, 10, 3])
    assert both == (0, 2)
    for place, index in enumerate(both):
        recorder.record(index, reply(30 + place), 2 + place)
    assert segments[2].parent == (0, 4)
    assert segments[2].prefix_break is PrefixBreak.PARALLEL


def test_a_call_that_comes_to_nothing_leaves_nothing():
    recorder = recorder_of()
    recorder.withdraw(recorder.place([1]))
    assert recorder.trajectory.segments == []
    say(recorder, [1], 10)
    recorder.withdraw(recorder.place([1, 10, 2]))
    assert recorder.trajectory.segments[0].ids == [1, 10]
    assert say(recorder, [1, 10, 2], 11) == 0, "asked again, it goes on"
    early, late = recorder.place([5]), recorder.place([6])
    recorder.withdraw(early)
    assert recorder.record(late, reply(60), 3) == (1, 2)
    assert recorder.trajectory.segments[late].ids == [6, 60]
    assert recorder.trajectory.prefix_breaks == 1, "an empty segment is no prefix break"
    recorder.withdraw(late)
    assert recorder.trajectory.segments[late].ids == [6, 60], "what is recorded stays"


def test_segments_that_are_there_may_be_continued_but_not_where_others_wrote_on():
    recorder = recorder_of(Segment(), Segment(ids=[1, 2], action_mask=[False, True]))
    assert recorder.place([1, 2, 3]) == 1
    recorder.withdraw(1)
    recorder.trajectory.segments[1].append_context([9])
    assert recorder.place([1, 2, 3]) == 2


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (
            GenerationResult([1, 2], [0.0], [0, 0]),
            RecordError,
            "2 tokens came with 1 log-probabilities and 2",
        ),
        (
            GenerationResult([1], [0.0], []),
            RecordError,
            "1 tokens came with 1 log-probabilities and 0 versions",
        ),
        (GenerationResult([True], [0.0], [0]), RecordError, "'True' as a token id"),
        (GenerationResult([-1], [0.0], [0]), RecordError, "'-1' as a token id"),
        (GenerationResult(["7" * 10**6], [0.0], [0]), RecordError, "as a token id"),
        (GenerationResult([1], [0.0], [0.5]), RecordError, "'0.5' as a policy version"),
        (
            GenerationResult([1], [math.nan], [0]),
            InvalidNumberError,
            "log-probability of the inference engine",
        ),
        (GenerationResult([1], [True], [0]), InvalidNumberError, "log-probability of the inference engine"),
        (GenerationResult([1], [0.5], [0]), InvalidNumberError, "above 0"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused_and_changes_nothing(result, error, words):
    recorder = recorder_of()
    index = recorder.place([1])
    with pytest.raises(error, match=words) as refused:
        recorder.record(index, result, 0)
    assert len(str(refused.value)) < 200
    assert recorder.trajectory.segments[index].ids == []
    recorder.withdraw(index)
    assert recorder.trajectory.segments == []


def test_a_call_is_recorded_once():
    recorder = recorder_of()
    index = say(recorder, [1], 10)
    with pytest.raises(ValueError, match="no call is under way"):
        recorder.record(index, reply(11), 0)


steps = st.lists(
    st.tuples(
        st.integers(0, 5),  # which earlier segment to start from
        st.integers(0, 8),  # how much of it to keep
        st.lists(st.integers(0, 2), max_size=3),  # what is added
        st.lists(st.integers(0, 2), min_size=1, max_size=3),  # what is sampled
        st.integers(0, 2),  # how many calls are left under way before this one is recorded
    ),
    max_size=10,
)


@given(steps)
def test_every_call_is_found_where_a_search_through_all_segments_finds_it(calls):
    """Beside a plain search: what is continued, how much is shared with the parent, and that nothing is lost."""
    recorder, sampled, asked = recorder_of(), [], []
    segments = recorder.trajectory.segments
    under_way: list[tuple[int, list[int], list[int], int]] = []
    for turn, (which, keep, more, ids, waiting) in enumerate(calls):
        written = [segment.ids for segment in segments if segment.ids]
        prompt = [*(written[which % len(written)][:keep] if written else []), *more] or [0]
        busy = {index for index, *_ in under_way}
        whole = [
            index
            for index, segment in enumerate(segments)
            if segment.ids and index not in busy and prompt[: len(segment.ids)] == segment.ids
        ]
        longest = max((len(segments[index].ids) for index in whole), default=0)
        index = recorder.place(prompt)
        if whole:
            assert index in whole
            assert len(segments[index].ids) == longest
        else:
            assert index == len(segments) - 1
            assert segments[index].ids == []
        under_way.append((index, prompt, ids, turn))
        while len(under_way) > waiting:
            index, prompt, ids, asked_at = under_way.pop(0)
            others = [segment.ids for each, segment in enumerate(segments) if each != index and segment.ids]
            is_new = not segments[index].ids
            start, end = recorder.record(index, reply(*ids), asked_at)
            assert segments[index].ids == prompt + ids
            assert (start, end) == (len(prompt), len(prompt) + len(ids))
            if is_new:
                expected = max((_common(prompt, each) for each in others), default=0)
                assert (segments[index].parent or (0, 0))[1] == expected
                assert (segments[index].prefix_break is None) == (not others)
            sampled += [(asked_at, token) for token in ids]
            asked.append((index, start, end))
    marked = [
        (turn, token)
        for segment in segments
        for token, used, turn in zip(segment.ids, segment.action_mask, segment.turn_index, strict=True)
        if used
    ]
    assert sorted(marked) == sorted(sampled), "every sampled token stands in the record once"
    for index, start, end in asked:
        assert all(segments[index].action_mask[start:end])


def _common(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
