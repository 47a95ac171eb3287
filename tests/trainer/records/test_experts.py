"""Experts that a rollout's tokens took, in records and in the rollout log."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.algorithms.presets import resolve_preset
from rollgym.trainer.backends.heads import PolicyHead
from rollgym.trainer.backends.optimizer import Schedule
from rollgym.trainer.backends.torch_backend import TorchBackend
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.learn.batches import episode_batch, row_builder
from rollgym.trainer.learn.learner import Learner, Models
from rollgym.trainer.records.experts import ExpertsReader, ExpertsWriter, from_bytes, from_record, to_bytes
from rollgym.trainer.records.rollout_log import EpisodeKey, RolloutLog
from rollgym.trainer.records.schema import EpisodeFormatError
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.log_replay import LoggedClient, LogReplay, session_key
from tests.support.megatron_ranks import family_model
from tests.support.played_groups import played_groups

KEY = EpisodeKey(3, 1, 0)

arrays = st.integers(1, 5).flatmap(
    lambda width: st.lists(
        st.lists(st.integers(-1, 300), min_size=width, max_size=width), min_size=1, max_size=6
    ).map(lambda rows: np.array(rows, dtype=np.int16))
)


@given(st.lists(st.none() | arrays, max_size=5))
def test_what_is_written_of_replies_is_read_back(replies):
    writer, reader = ExpertsWriter(), ExpertsReader()
    for each in replies:
        fields = None if each is None else writer.fields(each)
        found = reader.read(None if fields is None else json.loads(json.dumps(fields[:-1])) + fields[-1:])
        assert (found is None) if each is None else np.array_equal(found, each)


@given(kind=st.sampled_from(["u1", "i2", "f8", 1]), width=st.integers(-2, 40), content=st.binary(max_size=40))
def test_bytes_of_anybodys_are_experts_or_refused(kind, width, content):
    try:
        experts = from_bytes(kind, width, content)
    except ValueError:
        return
    assert experts.dtype == np.int16
    assert experts.min(initial=0) >= -1
    assert from_bytes(*to_bytes(experts)).tolist() == experts.tolist()


def test_small_numbers_take_a_byte_each():
    kind, width, content = to_bytes(np.full((10, 6), 127, dtype=np.int16))
    assert (kind, width, len(content)) == ("u1", 6, 60)


def routed_groups():
    """Episodes whose tokens took experts that the router would not choose; of the last one nothing is known."""
    draws = np.random.default_rng(7)
    groups = played_groups(family_model("qwen3_moe"))
    for group in groups:
        for trajectory in group.trajectories[:-1]:
            (segment,) = trajectory.segments
            scores = draws.random((len(segment.ids) - 1, 2, 4))
            segment.append_experts(scores.argsort(axis=-1)[..., :2].reshape(-1, 4).astype(np.int16))
    return groups


async def weights_after(groups, *, router_replay=False, **settings):
    optimizer = OptimizerSettings(tokens_per_micro_batch=60, gradient_clip=1e9)
    head = PolicyHead(family_model("qwen3_moe"), 1.0)
    policy = TorchBackend(head, optimizer, Schedule(1e-3, 0, 10, "constant"))
    learner = Learner(resolve_preset("grpo", settings), Models(policy), seed=1, router_replay=router_replay)
    await learner.update(episode_batch(groups, row_builder("trajectory")), step=0)
    digest = hashlib.blake2b()
    policy.digest(digest)
    return digest.hexdigest()


@pytest.mark.parametrize("router_replay", [False, True])
async def test_a_step_is_taken_again_from_its_records_to_equal_weights(router_replay):
    asked = {"minibatches": 2, "router_replay": router_replay}
    played = await weights_after(routed_groups(), **asked)
    read = routed_groups()
    for group in read:
        group.trajectories = [
            Trajectory.from_record(json.loads(json.dumps(each.as_record()))) for each in group.trajectories
        ]
    assert await weights_after(read, **asked) == played
    for group in read:
        for trajectory in group.trajectories:
            trajectory.segments[0].experts = None
    assert await weights_after(read, **asked) != played, "the experts made no difference"


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (["u1", 4, "???"], "segments.0.experts is not base64"),
        (["f8", 4, ""], "segments.0.experts is of none of the types"),
        (["u1", 0, ""], "segments.0.experts has no number of experts for each token"),
        (["u1", 4, "AAA="], "segments.0.experts has 2 bytes, which are not 4 experts for each token"),
        (["u1", 1, "A" * 400], "segments.0.experts is of 300 tokens, and there are"),
        (["i2", 1, "AIA="], "segments.0.experts has a number below -1"),
        (["u1", 4], "segments.0.experts: "),
        (["u1", 4, 5], "segments.0.experts "),
        (7, "segments.0.experts: "),
    ],
)
def test_damaged_experts_are_refused_where_they_are_wrong(experts, said):
    record = json.loads(json.dumps(routed_groups()[0].trajectories[0].as_record()))
    assert len(from_record(record["segments"][0]["experts"], 1000)) == len(record["segments"][0]["ids"]) - 1
    record["segments"][0]["experts"] = experts
    with pytest.raises(EpisodeFormatError) as refused:
        Trajectory.from_record(record)
    assert said in str(refused.value)


class Engine:
    """Answers with two tokens, and with experts that are others each time that it is asked."""

    def __init__(self):
        self.asked = 0

    async def generate(self, request):
        self.asked += 1
        tokens = len(request.prompt_ids) + 1
        experts = np.full((tokens, 4), self.asked, dtype=np.int16)
        experts[: tokens - 2] = 0  # the prompt, but for its last token
        return GenerationResult([8, 9], [-0.5, -0.5], [0, 0], "stop", experts)


def request(prompt):
    return GenerationRequest(
        "", prompt, SamplingParams(4, 1.0), seed=len(prompt), session_key=session_key("train", *KEY)
    )


PROMPTS = [[1, 2, 3], [1, 2, 3, 8, 9, 4, 5], [1, 2, 3, 8, 9, 4, 5, 8, 9, 6]]


async def play(folder, prompts):
    """Ask for replies as a process does that writes a log, and return them and how many were sampled."""
    said = []
    log = RolloutLog(folder, durable=False, say=said.append)
    log_replay, engine = LogReplay(log), Engine()
    client = LoggedClient(engine, log_replay)
    with log_replay.playing(KEY):
        results = [await client.generate(request(prompt)) for prompt in prompts]
    log.close()
    return results, engine.asked


async def test_a_resumed_run_has_the_experts_of_replies_that_its_log_holds(tmp_path):
    first, _ = await play(tmp_path, PROMPTS[:2])
    again, sampled = await play(tmp_path, PROMPTS)
    assert sampled == 1
    third, sampled = await play(tmp_path, PROMPTS)
    assert sampled == 0
    for found, expected in zip(again + third, first + again[2:] + again, strict=True):
        assert found.experts.tolist() == expected.experts.tolist()


async def test_what_a_conversation_took_is_written_once(tmp_path):
    prompts = [[1] * length for length in range(100, 1100, 100)]
    await play(tmp_path, prompts)
    log = tmp_path / "000001.log"
    assert log.stat().st_size < 10_000, "ten prompts of 5500 tokens with 4 experts each take 22000 bytes"


async def test_a_reply_whose_experts_were_lost_is_sampled_again(tmp_path):
    await play(tmp_path / "whole", PROMPTS)
    entries = list(RolloutLog(tmp_path / "whole", durable=False, say=print).read())
    damaged = RolloutLog(tmp_path / "damaged", durable=False, say=print)
    for entry in entries[1:]:
        damaged.append(entry)
    damaged.close()
    _, sampled = await play(tmp_path / "damaged", PROMPTS)
    assert sampled == 3
