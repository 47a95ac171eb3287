"""Replies of one inference server by its client, against the double of each, which says what it drew."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.errors import (
    MalformedReplyError,
    RepeatedAbortError,
)
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_client.in_flight import InFlightReplies, OngoingReply, PartialReply
from rollgym.trainer.records.images import Picture, PlacedImage
from tests.support.inference_server.models import END_ID
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import BOTH, PROMPT, logprobs_of, request


@BOTH
async def test_a_reply_is_what_the_engine_drew(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            result = await client.generate(request())
            drawn = server.log()["replies"][-1]
            assert result.token_ids == drawn["token_ids"]
            assert result.logprobs == pytest.approx(drawn["raw_logprobs"])
            assert result.logprobs == pytest.approx(logprobs_of(0, result.token_ids))
            assert result.policy_versions == [0] * 6
            assert result.finish_reason == "length"
            assert "episode" in drawn["session"]
            assert drawn["prompt_ids"] == PROMPT
            stop = result.token_ids[2]
            stopped = await client.generate(request(stop_token_ids=(stop,)))
            assert stopped.token_ids == result.token_ids[: result.token_ids.index(stop) + 1]
            assert stopped.finish_reason == "stop"
            counters = client.counters
            assert (counters.requests, counters.prompt_tokens, counters.running) == (2, 10, 0)
            assert counters.tokens_generated == 6 + len(stopped.token_ids)


@BOTH
async def test_replies_of_a_batch_come_in_order(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            together = await client.generate_together([request(f"r{n}", seed=n) for n in range(5)])
            alone = [await client.generate(request(seed=n)) for n in range(5)]
            assert [each.token_ids for each in together] == [each.token_ids for each in alone]
            with pytest.raises(ValueError, match="empty"):
                await client.generate_together([request(), GenerationRequest("e", [], SamplingParams(3), 0)])


async def test_without_scale_out_the_completions_route_brings_the_same():
    results = []
    for scale_out in (True, False):
        with InferenceServer("vllm", scale_out=scale_out) as server:
            async with ServerClient(server.url, "vllm") as client:
                assert client.capabilities.tokens_route is scale_out
                results.append(await client.generate(request()))
                assert await client.score(PROMPT) == pytest.approx(logprobs_of(0, [], start=1))
    assert results[0] == results[1]


@BOTH
async def test_a_prompt_is_scored(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            assert await client.score(PROMPT) == pytest.approx(logprobs_of(0, [], start=1))


@BOTH
async def test_what_a_server_could_only_answer_otherwise_is_refused(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            with pytest.raises(ConfigError, match="log-probabilities"):
                await client.generate(request(top_p=0.5))
            if dialect == "vllm":
                with pytest.raises(ConfigError, match="top_k"):
                    await client.generate(request(top_k=3))
            shown = (PlacedImage(1, 2, Picture(np.zeros((8, 8, 3), np.uint8))),)
            with pytest.raises(ConfigError, match="shows pictures"):
                await client.generate(replace(request(), images=shown))
            if dialect == "vllm":
                with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
                    await client.generate(request(temperature=0.5))
            else:
                assert (await client.generate(request(temperature=0.5))).finish_reason == "length"
            assert (await client.generate(request(temperature=0.0))).finish_reason == "length"
    switch = {"logprobs_mode": "processed_logprobs"} if dialect == "vllm" else {"original_logprobs": True}
    with InferenceServer(dialect, **switch) as server:
        async with ServerClient(server.url, dialect) as client:
            if dialect == "vllm":
                result = await client.generate(request(temperature=0.5, top_p=0.5, top_k=9))
                assert result.logprobs == pytest.approx(server.log()["replies"][-1]["processed_logprobs"])
            else:
                with pytest.raises(ConfigError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
                    await client.generate(request(temperature=0.5))


async def test_a_row_that_does_not_fit_is_refused_here():
    with InferenceServer("vllm", max_length=16) as server:
        async with ServerClient(server.url, "vllm") as client:
            with pytest.raises(ValueError, match="longest row"):
                await client.generate(request(tokens=12))
            assert server.state()["finished"] == 3  # Those of the probe.


@BOTH
async def test_an_abort_that_nobody_asked_for_is_no_end(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            path = "/inference" if dialect == "vllm" else "/generate"
            server.fail({"kind": "edit", "edit": "abort", "path": path, "count": 3})
            result = await client.generate(request())
            assert (len(result.token_ids), result.finish_reason) == (6, "length")
            server.fail({"kind": "edit", "edit": "abort", "path": path, "count": -1})
            with pytest.raises(RepeatedAbortError, match="something else pause"):
                await client.generate(request())


@BOTH
async def test_a_reply_is_aborted_with_what_it_has(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            server.steps(0)
            replies = [asyncio.create_task(client.generate(request(name))) for name in ("a", "b")]
            await server.until(waiting=2)
            server.steps(2)
            await server.until(drawn=4)
            assert await client.abort(["a", "unknown"]) == 1
            first = await replies[0]
            assert (first.finish_reason, len(first.token_ids)) == ("abort", 2)
            assert server.state()["running"] == 1
            assert await client.abort() == 1
            assert (await replies[1]).finish_reason == "abort"
            assert await client.abort() == 0


async def test_before_aborts_by_name_a_reply_is_dropped():
    with InferenceServer("vllm", "0.24.0") as server:
        async with ServerClient(server.url, "vllm") as client:
            before = server.state()["tokens"]
            server.steps(2)
            reply = asyncio.create_task(client.generate(request()))
            await server.until(tokens=before + 2)
            assert await client.abort() == 1
            assert (await reply).token_ids == []
            assert (await server.until(dropped=1))["running"] == 0


@BOTH
async def test_what_is_cancelled_is_dropped_at_the_server(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            before = server.state()["tokens"]
            server.steps(2)
            reply = asyncio.create_task(client.generate(request(tokens=500)))
            await server.until(tokens=before + 2)
            reply.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reply
            assert client.counters.running == 0
            server.steps(0)
            state = server.state()
            for _ in range(100):
                if not (state["running"] or state["waiting"]):
                    break
                await asyncio.sleep(0.01)
                state = server.state()
            assert (state["running"], state["waiting"]) == (0, 0)


@BOTH
async def test_a_pause_holds_what_comes(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            await client.pause("abort")
            await client.pause("keep")
            reply = asyncio.create_task(client.generate(request()))
            other = asyncio.create_task(client.generate(request("other")))
            await asyncio.sleep(0.05)
            assert not reply.done()
            assert not (await client.health()).ready
            assert await client.abort(["other"]) == 1
            assert (await other).token_ids == []
            await client.resume()
            await client.resume()
            assert len((await reply).token_ids) == 6
            assert (await client.health()).ready


async def test_answers_to_a_pause_that_come_one_after_the_other_are_all_waited_for(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.inference.server_client.in_flight._SETTLE_S", 0.2)
    under_way = InFlightReplies()
    ongoing = [OngoingReply(PartialReply(request()), rid=f"r{number}") for number in range(5)]
    for each in ongoing:
        under_way.begin(each)
    async with asyncio.timeout(20), asyncio.timeout(None) as limit:
        ongoing[-1].limit = limit
        settling = asyncio.create_task(under_way.settle(at_once))
        for each in ongoing:
            await asyncio.sleep(0.1)
            each.idle.set()
        await settling
    assert not limit.expired()


async def at_once():
    """Is answered at once."""


async def test_answers_of_a_server_that_has_little_processor_time_are_waited_for(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.inference.server_client.in_flight._SETTLE_S", 0.01)
    under_way, late = InFlightReplies(), OngoingReply(PartialReply(request()), rid="r")
    under_way.begin(late)

    async def after_what_it_owes():
        await asyncio.sleep(0.05)
        late.idle.set()

    async with asyncio.timeout(20), asyncio.timeout(None) as late.limit:
        await under_way.settle(after_what_it_owes)
    assert not late.limit.expired()


@BOTH
async def test_a_token_that_the_policys_model_does_not_know_is_refused(dialect):
    with InferenceServer(dialect) as server:
        async with (
            asyncio.timeout(30),
            ServerClient(server.url, dialect, way=None, vocabulary=END_ID) as client,
        ):
            assert len((await client.generate(request())).token_ids) == 6
            server.script([7])  # and the end
            with pytest.raises(
                MalformedReplyError, match="drew the token id 256, and the policy's model knows ids"
            ):
                await client.generate(request())
