"""An episode as plain data: all of it, read back as it was, and refused in words where it is damaged."""

import json
import time
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.config.run import TrackingSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import WriteError, read_lines
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.learn.tracking import Tracker
from rollgym.trainer.records.group import Group
from rollgym.trainer.records.images import Picture, PlacedImage
from rollgym.trainer.records.schema import EpisodeFormatError
from rollgym.trainer.records.trajectory import (
    Phase,
    PrefixBreak,
    Segment,
    Timeline,
    Trajectory,
    TrajectoryOutcome,
    Turn,
)
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.run.rollout import EpisodeWriter, read_recording
from rollgym.trainer.tasks.task import RewardMixture, RewardPart, Task

finite = st.floats(-1e9, 1e9, allow_nan=False)
# Whatever Python can hold, half of a surrogate pair and the line separators of Unicode too.
texts = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\u2028b", "\x85", "\n"])
replies = st.lists(st.tuples(st.integers(0, 9), st.floats(-50.0, 0.0), st.integers(0, 3)), max_size=4)


@st.composite
def trajectories(draw) -> Trajectory:
    options = draw(st.none() | st.just({"difficulty": [1, None, {"x": 0.1}]}))
    task = Task(
        draw(st.integers(0, 2**40)),
        draw(texts),
        draw(st.integers(0, 2**52)),
        {"size": 4},
        options,
        draw(texts),
    )
    trajectory = Trajectory(task, draw(st.integers(0, 9)), draw(st.integers(0, 3)))
    recorder = Recorder(trajectory)
    for number in range(draw(st.integers(0, 4))):
        written = [segment.ids for segment in trajectory.segments if segment.ids]
        start = draw(st.sampled_from(written)) if written else []
        prompt = [
            *start[: draw(st.integers(0, len(start)))],
            *draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)),
        ]
        reply = draw(replies)
        segment = recorder.place(prompt)
        result = GenerationResult(
            [a for a, _, _ in reply], [b for _, b, _ in reply], [c for _, _, c in reply]
        )
        start, end = recorder.record(segment, result, number)
        trajectory.turns.append(
            Turn(
                *(segment, start, end, draw(texts), draw(texts), draw(finite), draw(st.none() | texts)),
                action_is_valid=draw(st.booleans()),
                format_penalty=draw(finite),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
            )
        )
    trajectory.outcome = draw(st.sampled_from([*TrajectoryOutcome]))
    trajectory.detail = draw(texts)
    trajectory.metrics = draw(st.dictionaries(texts, finite, max_size=2))
    for turn in trajectory.turns:
        tokens = turn.end - turn.start
        advantages = st.lists(finite, min_size=tokens, max_size=tokens)
        turn.advantages = draw(
            st.just([]) | finite.map(lambda value, count=tokens: [value] * count) | advantages
        )
    return trajectory


@given(trajectories())
def test_what_is_written_is_what_is_read(tmp_path_factory, trajectory):
    path = tmp_path_factory.mktemp("records") / "episodes.jsonl"
    with EpisodeWriter(path) as writer:
        writer.write(trajectory)
    (line,) = path.read_bytes().splitlines()
    assert Trajectory.from_record(json.loads(line)) == trajectory
    if trajectory.turns:
        assert read_recording(path) == [(trajectory.task, [turn.reply for turn in trajectory.turns])]


def episode() -> Trajectory:
    trajectory = Trajectory(Task(3, "Any-v0", 7), 1, outcome=TrajectoryOutcome.SOLVED)
    recorder = Recorder(trajectory)
    for number, prompt in enumerate([[1, 2], [1, 2, 5, 6, 3], [1, 9]]):
        segment = recorder.place(prompt)
        span = recorder.record(segment, GenerationResult([5, 6], [-0.1, -1 / 3], [0, 1]), number)
        trajectory.turns.append(Turn(segment, *span, "seen", "said", reward=0.1 + 0.2, anchor="key"))
    return trajectory


def test_numbers_are_written_to_their_last_digit_and_a_prefix_break_with_its_parent():
    record = json.loads(json.dumps(episode().as_record()))
    assert record["segments"][0]["logprobs"] == [-0.1, -1 / 3, -0.1, -1 / 3]
    assert record["segments"][0]["versions"] == [[0, 1], [1, 1], [0, 1], [1, 1]]
    assert record["segments"][0]["turn_index"] == [[0, 2], [1, 2]]
    assert (record["segments"][1]["parent"], record["segments"][1]["fork"]) == ([0, 1], "conversation")
    assert record["forks"] == 1
    assert record["turns"][0]["reward"] == 0.1 + 0.2
    assert record["turns"][0]["anchor"] == "key"


@pytest.mark.parametrize(
    ("former", "name"), [("forks", "prefix_breaks"), ("fork_kinds", "prefix_break_kinds")]
)
def test_prefix_breaks_are_found_by_the_names_that_they_had(former, name):
    with pytest.warns(DeprecationWarning, match=f"Trajectory.{former} is called {name} now"):
        assert getattr(episode(), former) == getattr(episode(), name)


def full_episode() -> Trajectory:
    """An episode in which nothing is as it is by default."""
    part = RewardPart(
        "judge", "Judge-v0", 0.5, 0.25, {"reference": "answer"}, {"template": ["a"]}, "http://b:2"
    )
    mixture = RewardMixture(0.75, (part, RewardPart("other", "QA-v0", -0.25)))
    task = Task(
        3, "Any-v0", 7, {"size": 4}, {"answer": "5"}, "sums", "http://a:1", mixture, row="rows.jsonl, line 3"
    )
    segment = Segment(
        *([1, 2, 3, 4], [False, False, True, True], [0.0, 0.0, -0.1, -1 / 3], [-1, -1, 2, 3], [-1, -1, 1, 1]),
        *((0, 2), PrefixBreak.REWRITE, [PlacedImage(0, 1, Picture(np.full((2, 3, 3), 7, np.uint8)))]),
        experts=np.array([[0, 3], [1, 2], [300, -1]], np.int16),
    )
    turn = Turn(
        *(
            0,
            2,
            4,
            "seen",
            "said",
            0.1 + 0.2,
            "key",
            False,
            -0.5,
            "length",
            [0.25, -0.25],
            {"judge": 0.5},
            True,
            True,
        )
    )
    timeline = Timeline.from_seconds({phase.value: 0.5 + place for place, phase in enumerate(Phase)})
    return Trajectory(
        *(task, 1, 2, [segment], [turn], TrajectoryOutcome.SOLVED, "well", {"length": 4.0}, timeline),
        next_prompt=[5, 6],
    )


def parts_of(value: Any, path: str) -> dict[str, Any]:
    """All fields of a dataclass and of those inside of it, also those that equality passes over."""
    if isinstance(value, Timeline):
        return {path: value.seconds()}
    if isinstance(value, np.ndarray):
        return {path: (value.dtype.str, value.tolist())}
    if isinstance(value, list | tuple) and value and is_dataclass(value[0]):
        inner = {f"{path}.{place}": each for place, each in enumerate(value)}
    elif is_dataclass(value):
        inner = {f"{path}.{each.name}": getattr(value, each.name) for each in fields(value)}
    else:
        return {path: value}
    return {key: found for where, each in inner.items() for key, found in parts_of(each, where).items()}


def test_no_field_is_forgotten():
    written = full_episode()
    parts = [
        written,
        written.task,
        written.task.mixture,
        written.task.mixture_parts[0],
        *(*written.segments, *written.segments[0].images, *written.turns),
    ]
    for part in parts:
        for each in fields(part):
            default = each.default_factory() if callable(each.default_factory) else each.default
            value = getattr(part, each.name)
            unset = value is default or (not isinstance(value, np.ndarray) and value == default)
            assert not unset or isinstance(value, Timeline), (
                f"give {type(part).__name__}.{each.name} a value here"
            )
    read = Trajectory.from_record(json.loads(json.dumps(written.as_record())))
    assert parts_of(read, "episode") == parts_of(written, "episode")


def test_an_episode_without_a_mixture_is_written_as_before():
    assert {"mixture", "row"}.isdisjoint(episode().as_record()["task"])


def changed(path: str, value: object) -> object:
    """The record of an episode with another value at a path; a function is given the old one."""
    record = place = json.loads(json.dumps(episode().as_record()))
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in way:
        place = place[part]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return record


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", KeyError, "an earlier release wrote it"),
        ("format", 2, "its format is 2, and this release reads 1"),
        ("format", True, "its format is True"),
        ("format", [[]], "its format is a list"),
        ("outcome", "won", "outcome: 'won' is none of solved, failed"),
        ("outcome", "x" * 10**6, "outcome: 'xxx"),
        ("member", True, "member: "),
        ("member", -1, "member: "),
        ("task.seed", "7", "task.seed: "),
        ("task.mixture", {"own": 1.0, "parts": [{}]}, "task.mixture.parts.0.name: "),
        ("task.mixture", {"own": float("nan"), "parts": []}, "task.mixture.own: "),
        ("turns.0.reward", float("nan"), "turns.0.reward: "),
        ("turns.0.reward", True, "turns.0.reward: "),
        ("turns.1.tokens", [0, 5, 99], "turns.1.tokens: it does not lie within a segment"),
        ("turns.1.advantages", [0.5, 0.5, 0.5], "turns.1: 3 advantages for 2 tokens"),
        ("turns.1.advantages", [float("inf")], "turns.1.advantages"),
        ("seconds", {"generate": "long"}, "seconds.generate"),
        ("turns.1.tokens", [2, 0, 1], "turns.1.tokens: it does not lie within a segment"),
        ("turns.1.tokens", [-1, 0, 1], "turns.1.tokens: it does not lie within a segment"),
        ("turns.1.valid", 1, "turns.1.valid: "),
        ("segments.0.ids", lambda ids: ids[:-1], "segments.0: 6 ids, 7 marks"),
        ("segments.0.ids.2", -1, "segments.0.ids.2: "),
        ("segments.0.logprobs", lambda values: values[:-1], "segments.0: 7 ids"),
        ("segments.0.logprobs.0", float("inf"), "segments.0.logprobs.0: "),
        ("segments.0.action_mask.0", 2, "segments.0.action_mask.0: "),
        ("segments.0.versions", [[0, 10**15]], "segments.0.versions does not have a value for each of 4"),
        ("segments.0.versions", [[0, -1], [0, 5]], "segments.0.versions does not have"),
        ("segments.0.turn_index", [[0]], "segments.0.turn_index.0: "),
        ("segments.1.parent", [5, 0], "segments.1: its parent is not there"),
        ("segments.1.parent", [0, 99], "segments.1: its parent is not there"),
        ("segments.1.fork", "spoon", "segments.1.fork: 'spoon' is none of retry"),
    ],
)
def test_a_damaged_record_is_refused_where_it_is_wrong(path, value, words):
    with pytest.raises(EpisodeFormatError) as refused:
        Trajectory.from_record(changed(path, value))
    assert words in str(refused.value)
    assert len(str(refused.value)) < 350


@pytest.mark.parametrize("record", [None, [], "episode", 3])
def test_what_is_no_episode_at_all_is_refused(record):
    with pytest.raises(EpisodeFormatError, match="an episode is an object"):
        Trajectory.from_record(record)


def test_refusing_costs_no_more_than_reading():
    """A record that is wrong everywhere is given up at the first place, not told of in all of them."""

    size = 300_000
    whole = changed("segments.0.ids", [0] * size)
    whole["segments"][0]["action_mask"] = [0] * size
    wrong = changed("segments.0.ids", ["no id"] * size) | {"turns": [{}] * size}

    def cost(record: object) -> float:
        started = time.process_time()
        with pytest.raises(EpisodeFormatError):
            Trajectory.from_record(record)
        return time.process_time() - started

    cost(wrong)
    assert cost(wrong) < 5 * cost(whole), "three hundred thousand errors would take seconds"


def test_what_an_environment_is_made_with_may_be_nested_deep():
    deep: object = 0
    for _ in range(500):
        deep = [deep]
    assert Trajectory.from_record(changed("task.kwargs", {"deep": deep})).task.kwargs == {"deep": deep}


def test_keys_of_a_later_release_are_passed_over():
    record = changed("detail", "well") | {"step": 4, "group": {"index": 0}, "weather": "fine"}
    assert Trajectory.from_record(record).detail == "well"


def test_a_recording_says_the_line_and_the_reason(tmp_path):
    path = tmp_path / "episodes.jsonl"
    good = json.dumps(episode().as_record())
    for bad, reason in [
        (json.dumps(changed("outcome", "won")), "outcome: 'won'"),
        ("[" * 100_000, "Invalid JSON"),
        ("{", "Invalid JSON"),
        (json.dumps(changed("turns", [])), "turns: it has none"),
    ]:
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ConfigError, match="line 2 is not an episode") as refused:
            read_recording(path)
        assert reason in str(refused.value)


def test_episodes_of_earlier_releases_can_still_be_played_again(tmp_path):
    path = tmp_path / "episodes.jsonl"
    earlier = {
        "step": 0,
        "task": {"index": 3, "env_id": "Any-v0", "seed": 7},
        "turns": [{"reply": "Up", "reward": 0.0}],
    }
    path.write_text(json.dumps(earlier) + "\n")
    assert read_recording(path) == [(Task(3, "Any-v0", 7), ["Up"])]


def test_a_runs_episodes_say_what_became_of_their_group_and_its_place_in_the_batch(tmp_path):
    groups = [
        Group(4, episode().task, 2, [episode(), episode()], decision="kept"),
        Group(3, episode().task, 1, [episode()], {"timeout": 1}, decision="filter:equal_returns"),
    ]
    tracker = Tracker(tmp_path, TrackingSettings(tensorboard=False), 0)
    tracker.episodes(6, groups)
    tracker.close()
    lines = read_lines(tmp_path / "episodes.jsonl")
    assert [line["group"] for line in lines] == [
        *[{"index": 4, "place": 0, "admitted_version": 2, "decision": "kept", "failures": {}}] * 2,
        {
            "index": 3,
            "place": 1,
            "admitted_version": 1,
            "decision": "filter:equal_returns",
            "failures": {"timeout": 1},
        },
    ]
    assert [Trajectory.from_record(line) for line in lines] == [episode()] * 3


def test_a_disk_that_is_full_is_named():
    with (
        pytest.raises(WriteError, match="cannot write /dev/full: No space left on device"),
        EpisodeWriter(Path("/dev/full")) as writer,
    ):
        writer.write(episode())
