"""Experts that servers say tokens took: read, put together over stretches and turns, and laid beside tokens."""

import base64
import json
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.trainer.config.inference import InferenceSettings
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.calls import HttpAnswer
from rollgym.trainer.inference.errors import MalformedReplyError
from rollgym.trainer.inference.server_client.in_flight import PartialReply
from rollgym.trainer.inference.servers.chunks import read_array_file, read_integers
from rollgym.trainer.learn.batches import step_rows, trajectory_rows
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task
from tests.support.dialect_replies import CALL, GOOD, SGLANG, VLLM

ASKED = replace(CALL, sampling=replace(CALL.sampling, routed_experts=True))
EXPERTS = np.arange(5 * 2 * 2, dtype=np.uint8).reshape(
    5, 2, 2
)  # 3 tokens of prompt and 3 of reply, but the last


def array_file(content) -> str:
    buffer = BytesIO()
    np.save(buffer, content)
    return base64.b64encode(buffer.getvalue()).decode()


def integers(content) -> str:
    return base64.b64encode(np.ascontiguousarray(content, dtype="<i4").tobytes()).decode()


def vllm_reply(experts):
    reply = json.loads(json.dumps(GOOD[VLLM]))
    reply["choices"][0]["routed_experts"] = experts
    return HttpAnswer(200, json.dumps(reply).encode())


def sglang_reply(experts):
    reply = json.loads(json.dumps(GOOD[SGLANG]))
    reply["meta_info"]["routed_experts"] = experts
    return HttpAnswer(200, json.dumps(reply).encode())


def test_both_kinds_of_servers_are_read_alike():
    one = VLLM.read_generation(vllm_reply(array_file(EXPERTS)), ASKED).experts
    other = SGLANG.read_generation(sglang_reply(integers(EXPERTS)), ASKED).experts
    assert one.tolist() == other.tolist() == EXPERTS.reshape(5, 4).tolist()
    assert VLLM.read_generation(vllm_reply(array_file(EXPERTS)), CALL).experts is None, "nobody asked"
    assert SGLANG.generate(ASKED).body["return_routed_experts"] is True
    assert "return_routed_experts" not in SGLANG.generate(CALL).body


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "start vLLM with --enable-return-routed-experts"),
        ("???", "is not base64"),
        (base64.b64encode(b"no file").decode(), "no file of numpy"),
        (array_file(EXPERTS[0]), "no array of tokens, layers and experts"),
        (array_file(EXPERTS[:4]), "is of 4 tokens, and 5 were computed|for 5 tokens that were computed"),
        (array_file(EXPERTS.astype(np.float32)), "no expert's number"),
        (array_file(EXPERTS.astype(np.int64) + 40_000), "no expert's number"),
        (array_file(EXPERTS.astype(np.int8) - 9), "no expert's number"),
        (array_file(np.array([[["x"]]], dtype=object)), "no array of tokens"),
        (array_file(np.zeros((5, 2, 2), dtype=[("a", "<i4")])), "no array of tokens"),
    ],
)
def test_what_is_no_experts_is_refused(content, said):
    with pytest.raises(MalformedReplyError, match=said):
        VLLM.read_generation(vllm_reply(content), ASKED)


def test_a_file_that_claims_a_size_that_it_has_not_takes_no_memory():
    buffer = BytesIO()
    header = {"descr": "<i4", "fortran_order": False, "shape": (5, 2**40, 2**10)}
    np.lib.format.write_array_header_1_0(buffer, header)
    with pytest.raises(MalformedReplyError, match="no array of tokens"):
        read_array_file(base64.b64encode(buffer.getvalue()).decode(), 6, "a reply")


@pytest.mark.parametrize(
    ("descr", "shape"), [("<i4", (-1, -1, 20)), (("<i4", (2,)), (5, 2, 1)), ("<i4", (-5, -2, 2))]
)
def test_a_file_with_an_odd_shape_is_refused(descr, shape):
    buffer = BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, header)
    buffer.write(bytes(80))
    with pytest.raises(MalformedReplyError, match="no array of tokens"):
        read_array_file(base64.b64encode(buffer.getvalue()).decode(), 6, "a reply")


@settings(max_examples=80)
@given(st.binary(max_size=200) | st.text(max_size=50), st.integers(1, 8))
def test_anything_is_read_or_refused(content, tokens):
    text = base64.b64encode(content).decode() if isinstance(content, bytes) else content
    for read in (read_array_file, read_integers):
        try:
            found = read(text, tokens, "a reply")
        except MalformedReplyError:
            continue
        assert len(found) == tokens - 1
        assert found.min() >= 0


def test_a_reply_in_stretches_has_the_experts_that_each_was_drawn_with():
    reply = PartialReply(GenerationRequest("a", [1, 2], SamplingParams(9), 0))
    reply.add([3, 4], [0.0, 0.0], [0, 0], np.array([[1], [2], [3]], dtype=np.int16))
    reply.add([5], [0.0], [1], np.array([[9], [9], [9], [4]], dtype=np.int16))
    assert reply.result("stop").experts.tolist() == [[1], [2], [3], [4]]
    plain = PartialReply(GenerationRequest("a", [1, 2], SamplingParams(9), 0))
    plain.add([3], [0.0], [0])
    assert plain.result("stop").experts is None


def test_rows_have_the_experts_of_their_tokens():
    trajectory = Trajectory(Task(0, "Echo-v0", 0), 0)
    recorder = Recorder(trajectory)
    prompt, reply = [1, 2], [3, 4]
    experts = np.arange(3, dtype=np.int16)[:, None]
    index = recorder.place(prompt)
    span = recorder.record(index, GenerationResult(reply, [-1.0, -1.0], [0, 0], experts=experts), 0)
    assert span == (2, 4)
    assert trajectory.segments[0].experts.tolist() == [[0], [1], [2]]
    longer = [*prompt, *reply, 5]
    index = recorder.place(longer)
    # What was known is kept: replies were drawn with it.
    later = np.arange(10, 16, dtype=np.int16)[:, None]
    recorder.record(index, GenerationResult([6, 7], [-1.0, -1.0], [0, 0], experts=later), 1)
    segment = trajectory.segments[0]
    assert segment.experts[:, 0].tolist() == [0, 1, 2, 13, 14, 15]
    (whole,) = trajectory_rows(0, trajectory)
    row = whole.tensors(experts=True)
    assert row.experts.dtype == torch.int16
    assert row.experts[:, 0].tolist() == [0, 1, 2, 13, 14, 15]
    assert whole.tensors().experts is None
    trajectory.turns = []
    assert step_rows(0, trajectory) == []


def test_the_embedded_engine_does_not_tell():
    with pytest.raises(ValueError, match="routed_experts: the embedded engine does not tell"):
        InferenceSettings(routed_experts=True)
    assert InferenceSettings(kind="vllm", urls=["http://127.0.0.1:1"], routed_experts=True).routed_experts
