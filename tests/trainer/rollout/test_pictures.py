"""Pictures of an environment in prompts and in the record: which tokens stand for which, and never for another."""

import base64
import json
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from rollgym.clients.protocol.arrays import DecodeError, MediaBytes
from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.learn.batches import step_rows, trajectory_rows
from rollgym.trainer.records.images import Picture
from rollgym.trainer.records.schema import EpisodeFormatError
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.agent import view_of
from rollgym.trainer.rollout.context import context_policy, observation_messages
from rollgym.trainer.rollout.log_replay import _digest
from rollgym.trainer.rollout.prompts import ChatRenderer, PromptBuilder
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task
from tests.support.seeing_models import PICTURES, TOKENIZER, picture

RENDERER = ChatRenderer(TOKENIZER, pictures=PICTURES)
PIXELS = [picture(number).pixels for number in range(4)]


def play(observations, *, context="full_history", infos=None):
    """Feed observations through a builder, every reply being `Up`; return the record and every prompt."""
    settings = PromptSettings(instruction="none", context=context)
    builder = PromptBuilder(RENDERER, context_policy(settings), settings)
    trajectory, prompts = Trajectory(Task(0, "Any-v0", 0), 0), []
    builder.begin({})
    recorder = Recorder(trajectory)
    for turn, observation in enumerate(observations):
        view = view_of(turn, observation, {} if infos is None else infos[turn])
        prompts.append(builder.prompt(trajectory, view.messages))
        ids = RENDERER.reply_ids("Up")
        segment = recorder.place(prompts[-1].ids, prompts[-1].images)
        start, end = recorder.record(segment, GenerationResult(ids, [-0.5] * len(ids), [0] * len(ids)), turn)
        builder.replied(view.messages, "Up", segment)
        trajectory.turns.append(turn_of(segment, start, end, view.text))
    return trajectory, prompts


def turn_of(segment, start, end, text):
    from rollgym.trainer.records.trajectory import Turn

    return Turn(segment=segment, start=start, end=end, observation=text, reply="Up")


def test_a_history_of_pictures_is_one_segment_with_each_in_its_place():
    trajectory, prompts = play(PIXELS[:3], infos=[{}, {"caption": "Invalid action."}, {}])
    (segment,) = trajectory.segments
    assert [image.picture for image in segment.images] == [Picture(each) for each in PIXELS[:3]]
    for image in segment.images:
        assert segment.ids[image.start : image.end] == [PICTURES.token_id] * 4
        assert image.picture.inputs["pixel_values"].shape == (1, 3, 16, 16)
    assert prompts[2].images == tuple(segment.images)
    text = TOKENIZER.decode(segment.ids)
    assert text.count("<|image|><|image|><|image|><|image|>Invalid action.<|end|>") == 1
    assert trajectory.turns[1].observation == "[picture of 16 x 16 pixels]\nInvalid action."


def test_equal_ids_with_other_pictures_are_segments_of_their_own():
    trajectory, _ = play([PIXELS[0], PIXELS[1], PIXELS[0]], context="single_turn")
    assert len({tuple(segment.ids) for segment in trajectory.segments}) == 1
    assert [segment.images[0].picture for segment in trajectory.segments] == [
        Picture(PIXELS[0]),
        Picture(PIXELS[1]),
        Picture(PIXELS[0]),
    ]
    assert trajectory.segments[1].parent == (0, 1)  # alike up to the picture
    recorder = Recorder(trajectory)
    more = [*trajectory.segments[0].ids, 7]
    places = [recorder.place(more, shown_in(trajectory, each)) for each in (0, 1, 0, 0)]
    assert places == [2, 1, 0, 3]  # the newest that showed it, and at last one of its own


def shown_in(trajectory, segment):
    return list(trajectory.segments[segment].images)


def test_a_record_gives_the_pictures_back_and_rows_take_theirs():
    trajectory, _ = play(PIXELS[:3])
    again = Trajectory.from_record(json.loads(json.dumps(trajectory.as_record())))
    assert again.segments == trajectory.segments
    images = PICTURES.filled(again.segments[0].images)
    assert (
        images[2]
        .picture.inputs["pixel_values"]
        .equal(trajectory.segments[0].images[2].picture.inputs["pixel_values"])
    )
    assert [len(row.images) for row in step_rows(0, again)] == [1, 2, 3]
    assert [len(row.images) for row in trajectory_rows(0, again)] == [3]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"start": 5, "end": 5}, "does not lie within"),
        ({"end": 10_000}, "does not lie within"),
        ({"png": "no base64!"}, "segments.0.images.0"),
        ({"png": base64.b64encode(b"no picture").decode()}, "no picture that can be read"),
    ],
)
def test_a_record_of_no_picture_is_refused(broken, message):
    record = play(PIXELS[:1])[0].as_record()
    record["segments"][0]["images"][0] |= broken
    with pytest.raises(EpisodeFormatError, match=message):
        Trajectory.from_record(record)


def test_a_record_without_pictures_is_what_it_was():
    record = play(["board"])[0].as_record()
    assert "images" not in record["segments"][0]


def test_pictures_may_be_files_in_messages():
    written = BytesIO()
    Image.fromarray(PIXELS[0]).save(written, "PNG")
    content = [
        {"type": "text", "text": "look"},
        {"type": "image", "image": MediaBytes(written.getvalue(), "image/png")},
        {"type": "image", "image": PIXELS[1]},
    ]
    messages = observation_messages("board", {"messages": [{"role": "user", "content": content}]})
    prompt = RENDERER.read(messages)
    assert [image.picture for image in prompt.images] == [Picture(PIXELS[0]), Picture(PIXELS[1])]
    broken = [{"role": "user", "content": [{"type": "image", "image": MediaBytes(b"x", "image/png")}]}]
    with pytest.raises(DecodeError, match="no picture that can be read"):
        observation_messages("board", {"messages": broken})
    with pytest.raises(DecodeError, match="must be an array of uint8"):
        observation_messages(
            "b", {"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}
        )


def test_text_that_looks_like_a_placeholder_is_none():
    prompt = RENDERER.read(
        [
            {"role": "user", "content": "a <|image|> of text"},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": Picture(PIXELS[0])},
                    {"type": "text", "text": "<|image|>"},
                ],
            },
        ]
    )
    assert prompt.ids.count(PICTURES.token_id) == 4
    assert len(prompt.images) == 1
    assert "a <|image|> of text" in TOKENIZER.decode(prompt.ids)


def test_a_policy_that_reads_text_says_so():
    blind = ChatRenderer(TOKENIZER)
    with pytest.raises(ConfigError, match="the policy sees none"):
        blind.read(observation_messages(PIXELS[0], {}))


def test_replies_are_recalled_by_what_was_shown():
    def request(number):
        prompt = RENDERER.read(observation_messages(PIXELS[number], {}))
        return GenerationRequest("x", prompt.ids, SamplingParams(4), 0, images=prompt.images)

    assert request(0).prompt_ids == request(1).prompt_ids
    assert _digest(request(0)) == _digest(request(0))
    assert _digest(request(0)) != _digest(request(1))


def test_arrays_that_are_no_pictures_are_shown_as_text():
    for array in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros(3, np.uint8)):
        (message,) = observation_messages(array, {})
        assert message["content"] == str(array)


def test_a_picture_that_is_small_on_the_wire_and_huge_unpacked_is_refused_by_its_head():
    packed = BytesIO()
    Image.new("1", (4097, 4096)).save(packed, "PNG")
    assert len(packed.getvalue()) < 4096
    with pytest.raises(ValueError, match="4097 x 4096 pixels are too many"):
        Picture.from_bytes(packed.getvalue())
