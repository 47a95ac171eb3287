"""Replies of servers that are told while they are drawn: the same as those that are not, and never told twice."""

import asyncio
import json
from dataclasses import replace

import pytest

from rollgym.trainer.inference.calls import HttpAnswer
from rollgym.trainer.inference.errors import InferenceError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_client.replies import ReplyEvents
from rollgym.trainer.inference.servers.dialect import ServerCapabilities
from rollgym.trainer.inference.servers.sglang import SglangDialect
from rollgym.trainer.inference.servers.vllm import VllmDialect
from tests.support.inference_server.running import InferenceServer, InferenceServerProcess
from tests.support.server_weights import request


@pytest.mark.parametrize(
    ("dialect", "release", "options"),
    [
        ("vllm", None, {}),
        ("vllm", "0.26.0", {}),
        ("vllm", None, {"scale_out": False}),
        ("sglang", None, {"incremental": True}),
    ],
)
async def test_tokens_are_told_as_they_are_drawn(dialect, release, options):
    with InferenceServer(dialect, release, **options) as server:
        async with asyncio.timeout(30), ServerClient(server.url, dialect, way=None) as client:
            plain = await client.generate(request(tokens=9, seed=3))
            server.steps(4)
            told = []
            asked = replace(request("told", tokens=9, seed=3), on_tokens=told.extend)
            running = asyncio.create_task(client.generate(asked))
            while len(told) < 4:
                await asyncio.sleep(0.005)
            assert not running.done()
            server.steps(None)
            assert await running == plain
            assert told == plain.token_ids
            short = []
            await client.generate(replace(request("short", tokens=1), on_tokens=short.extend))
            assert len(short) == 1


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_a_reply_that_takes_new_weights_goes_on_being_told(dialect, tmp_path):
    from tests.support.server_weights import Weights

    options = {"incremental": True} if dialect == "sglang" else {}
    with InferenceServer(dialect, **options) as server:
        async with asyncio.timeout(30), ServerClient(server.url, dialect, way="disk") as client:
            told = []
            server.steps(3)
            asked = replace(request(tokens=8), on_tokens=told.extend)
            running = asyncio.create_task(client.generate(asked))
            while len(told) < 3:
                await asyncio.sleep(0.005)
            server.steps(0)
            syncing = asyncio.create_task(client.sync(Weights(1, tmp_path), 1))
            await asyncio.sleep(0.05)
            server.steps(None)
            await syncing
            result = await running
            assert told == result.token_ids
            assert set(result.policy_versions) == {0, 1}


async def test_streams_that_repeat_everything_are_not_asked_for():
    """SGLang's own way: the length of a long reply, squared."""
    with InferenceServer("sglang") as server:
        async with asyncio.timeout(30), ServerClient(server.url, "sglang", way=None) as client:
            told = []
            await client.generate(replace(request(), on_tokens=told.extend))
            assert told == []


async def test_a_stream_that_repeats_everything_is_read_where_it_comes():
    """A server that was started again without its switch, before anybody asked it anew what it can do."""
    server = InferenceServerProcess("sglang", "--incremental").start()
    try:
        async with asyncio.timeout(60), ServerClient(server.url, "sglang", way=None) as client:
            asked = request(tokens=9, seed=3)
            plain = await client.generate(asked)
            server.stop()
            server = InferenceServerProcess("sglang", port=server.port).start()
            told = []
            assert await client.generate(replace(asked, on_tokens=told.extend)) == plain
            assert told == plain.token_ids
    finally:
        server.stop()


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("parts", [[9], [1, 1, 1], [2, 0, 3], [1] * 7])
def test_both_kinds_of_sglangs_streams_amount_to_one_reply(repeats, parts):
    dialect = SglangDialect(
        ServerCapabilities("SGLang", (0, 5, 23), "policy", None, "temperature", None, True)
    )
    drawn = [7] * sum(parts)  # all equal: nothing but their number tells the two apart
    bodies, count = [], 0
    for part in parts:
        start, count = (0 if repeats else count), count + part
        meta = {
            "completion_tokens": count,
            "output_token_logprobs": [[-0.5, each, None] for each in drawn[start:count]],
        }
        bodies.append({"output_ids": drawn[start:count], "meta_info": meta})
    told = []
    reading = ReplyEvents(dialect, told.extend)
    reading.reading()(b"".join(events(*bodies)))
    whole = json.loads(reading.answer(HttpAnswer(200, b"data: ...")).body)
    assert told == whole["output_ids"] == drawn
    assert len(whole["meta_info"]["output_token_logprobs"]) == len(drawn)


async def test_who_leaves_ends_the_drawing():
    with InferenceServer("vllm") as server:
        async with asyncio.timeout(30), ServerClient(server.url, "vllm", way=None) as client:
            told = []
            server.steps(2)
            asked = replace(request(tokens=500), on_tokens=told.extend)
            running = asyncio.create_task(client.generate(asked))
            while not told:
                await asyncio.sleep(0.005)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.steps(None)
            while server.state()["running"]:
                await asyncio.sleep(0.02)
            assert (
                max(len(each["token_ids"]) for each in server.log()["replies"][-1:] or [{"token_ids": []}])
                < 500
            )


def events(*bodies):
    return [b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n" for body in bodies]


def test_parts_may_end_anywhere_and_what_was_told_is_not_told_again():
    dialect = VllmDialect(ServerCapabilities("vLLM", (0, 33), "policy", None, "sampled", None, True))
    choices = [
        {"choices": [{"index": 0, "token_ids": [each], "x": "é", "finish_reason": None}]} for each in range(5)
    ]
    stream = b"".join([*events(*choices), b": a comment\n\n", b"data: [DONE]\n\n"])
    for step in (1, 2, 3, 7, 1000):
        told = []
        reading = ReplyEvents(dialect, told.extend)
        take = reading.reading()
        for place in range(0, 150, step):
            take(stream[place : min(150, place + step)])
        before = list(told)
        assert 0 < len(before) < 5
        take = reading.reading()  # it was lost, and is drawn again
        for place in range(0, len(stream), step):
            take(stream[place : place + step])
        assert told == [0, 1, 2, 3, 4]
        answer = json.loads(reading.answer(HttpAnswer(200, stream)).body)
        assert answer["choices"][0]["token_ids"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "event", [{"error": {"message": "out of memory", "code": 500}}, "no object", {"choices": "none"}, {}]
)
async def test_a_stream_that_is_none_is_an_error(event):
    dialect = VllmDialect(ServerCapabilities("vLLM", (0, 33), "policy", None, "sampled", None, True))
    told = []
    reading = ReplyEvents(dialect, told.extend)
    reading.reading()(b"".join(events(event)))
    answer = reading.answer(HttpAnswer(200, b"data: ..."))
    with pytest.raises(InferenceError):
        dialect.read_generation(answer, None)
    assert told == []
