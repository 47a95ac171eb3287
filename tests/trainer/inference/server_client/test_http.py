"""Servers that are away, busy, broken, of another kind or none at all: the client waits, or says what is wrong."""

import asyncio

import pytest

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.errors import (
    MalformedReplyError,
    RequestRefusedError,
    ServerGoneError,
    ServerSetupError,
    ServerTooOldError,
    WeightsLostError,
    WeightUpdateError,
)
from rollgym.trainer.inference.server_client import http
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_client.in_flight import PartialReply
from tests.support.inference_server.carrier import GlooCarrier
from tests.support.inference_server.running import InferenceServer, InferenceServerProcess
from tests.support.server_weights import BOTH, Weights, logprobs_of, request

PAGE = "\n<!doctype html><html><body>default backend</body></html>"


@BOTH
@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "answer", "status": 503, "count": 3},
        {"kind": "answer", "status": 500, "count": 2},
        {"kind": "answer", "status": 502, "count": 2, "body": PAGE},
        {"kind": "answer", "status": 404, "count": 2, "body": PAGE},
        {"kind": "answer", "status": 200, "count": 2, "body": PAGE},
        {"kind": "answer", "status": 503, "count": 2, "body": "no healthy upstream"},
        {"kind": "cut", "count": 2},
        {"kind": "cut_body", "count": 2},
        {"kind": "late", "seconds": 0.1},
    ],
    ids=lambda fault: f"{fault['kind']}-{fault.get('status', '')}",
)
async def test_what_passes_is_waited_for(dialect, fault):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            expected = await client.generate(request())
            server.fail({"path": "/inference" if dialect == "vllm" else "/generate", **fault})
            assert await client.generate(request()) == expected
            assert len(server.state()["faults"]) == fault.get("count", 1)


@BOTH
@pytest.mark.parametrize(
    "edit", ["short_logprobs", "null_logprobs", "true_logprobs", "nan_logprobs", "no_logprobs", "floor"]
)
async def test_a_reply_that_breaks_the_contract_is_refused(dialect, edit):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            server.fail({"kind": "edit", "edit": edit})
            with pytest.raises(MalformedReplyError):
                await client.generate(request())
            assert len((await client.generate(request())).token_ids) == 6


@BOTH
async def test_refusals_and_rubbish_have_their_types(dialect):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect) as client:
            refused = GenerationRequest("r", [5000], SamplingParams(2), 0)
            with pytest.raises(RequestRefusedError, match="vocabulary"):
                await client.generate(refused)
            for body in ("[" * 100_000, '{"a":' * 10_000, "html" * 300_000, "", "null", '"x"', "{}"):
                server.fail({"kind": "answer", "status": 200, "body": body})
                with pytest.raises(MalformedReplyError) as raised:
                    await client.generate(request())
                assert len(str(raised.value)) < 1000
            path = "/inference" if dialect == "vllm" else "/generate"
            server.fail({"kind": "answer", "status": 500, "count": -1, "path": path})
            with pytest.raises(RequestRefusedError, match="overloaded"):
                await client.generate(request())


async def test_a_page_is_no_server():
    """What stands before a server answers while that is gone; at the start it may be the wrong address."""
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm", patience_s=1.5) as client:
            server.fail({"kind": "answer", "status": 200, "body": PAGE, "count": -1})
            assert not (await client.health()).ready
            with pytest.raises(ServerGoneError, match="default backend"):
                await client.generate(request())
            for status, kind in ((200, MalformedReplyError), (404, ServerSetupError)):
                server.fail({"kind": "answer", "status": status, "body": PAGE, "count": -1})
                async with asyncio.timeout(20):
                    with pytest.raises(kind):
                        await ServerClient(server.url, "vllm", patience_s=60.0).connect()


async def test_what_a_proxy_may_have_passed_on_is_not_sent_twice():
    """Tensors would be announced that nobody sends."""
    carrier = GlooCarrier("vllm")
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm", way="broadcast", carrier=carrier) as client:
            server.fail({"kind": "answer", "path": "/update_weights", "status": 504, "body": PAGE})
            with pytest.raises(WeightUpdateError, match="lost on its way"):
                await client.sync(Weights(1), 1)
            await client.sync(Weights(2), 2)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(2, result.token_ids))


async def test_a_reply_keeps_what_was_drawn_when_its_server_is_lost():
    with InferenceServer("vllm") as first, InferenceServer("vllm") as second:
        async with (
            ServerClient(first.url, "vllm", patience_s=1.5) as client,
            ServerClient(second.url, "vllm") as other,
        ):
            before, before_of_second = first.state()["tokens"], second.state()["tokens"]
            reply = PartialReply(request(tokens=9))
            first.steps(4)
            drawing = asyncio.create_task(client.extend(reply))
            await first.until(tokens=before + 4)
            await client.pause("abort")
            path = "/inference"
            first.fail(
                {"kind": "cut", "path": path, "count": -1}, {"kind": "answer", "path": "/health", "count": -1}
            )
            await client.resume()
            with pytest.raises(ServerGoneError):
                await drawing
            drawn = list(reply.token_ids)
            assert len(drawn) == 4
            assert await other.extend(reply) == "length"
            assert reply.token_ids[:4] == drawn
            assert second.state()["tokens"] - before_of_second == 5
            assert reply.logprobs == pytest.approx(logprobs_of(0, reply.token_ids))


async def test_an_engine_that_is_dead_behind_its_front_is_given_up():
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "vllm", patience_s=1.5) as client:
            server.fail({"kind": "answer", "status": 500, "count": -1})
            with pytest.raises(ServerGoneError):
                await client.generate(request())


async def test_a_health_that_flaps_costs_no_reply():
    with InferenceServer("vllm", step_s=0.02) as server:
        async with ServerClient(server.url, "vllm", patience_s=5.0, watch_every_s=0.02) as client:
            server.fail(*[{"kind": "answer", "path": "/health", "skip": skip} for skip in (0, 1, 1)])
            assert len((await client.generate(request(tokens=12))).token_ids) == 12
            assert server.state()["faults"]
            assert client.counters.resubmitted == 0


async def test_a_server_that_never_comes_is_given_up():
    client = ServerClient("http://127.0.0.1:9", "vllm", patience_s=0.2)
    with pytest.raises(ServerGoneError, match=r"0\.2 s"):
        await client.connect()
    await client.close()
    with pytest.raises(ConfigError, match="http://"):
        ServerClient("localhost:8000", "vllm")


@BOTH
async def test_a_server_that_is_started_again_has_lost_its_weights(dialect, tmp_path):
    with InferenceServerProcess(dialect) as server:
        async with ServerClient(server.url, dialect, patience_s=30) as client:
            first = await client.generate(request())
            server.kill()
            waiting = asyncio.create_task(client.generate(request()))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.start)
            # Before anything was sent, the weights of the start are the run's.
            assert await waiting == first
            await client.sync(Weights(1, tmp_path), 1)
            server.kill()
            waiting = asyncio.create_task(client.generate(request()))
            await asyncio.to_thread(server.start)
            with pytest.raises(WeightsLostError, match="default"):
                await waiting
            with pytest.raises(WeightsLostError):
                await client.generate(request())
            assert not (await client.health()).ready
            await client.sync(Weights(1, tmp_path), 1)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


@BOTH
async def test_an_update_that_takes_longer_than_a_server_may_be_silent_goes_through(
    dialect, tmp_path, monkeypatch
):
    monkeypatch.setattr(http, "_HEALTH_S", 0.3)
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, patience_s=0.5, watch_every_s=0.1) as client:
            paths = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}
            server.fail({"kind": "late", "path": paths[dialect], "seconds": 2.5})
            await client.sync(Weights(1, tmp_path), 1)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


async def test_a_server_that_stands_still_with_its_connections_open_is_given_up():
    with InferenceServerProcess("vllm") as server:
        async with ServerClient(server.url, "vllm", patience_s=1.5, watch_every_s=0.1) as client:
            await client.generate(request())
            server.stand_still()
            with pytest.raises(ServerGoneError, match=r"1\.5 s"):
                await client.generate(request())
            server.go_on()
            assert len((await client.generate(request())).token_ids) == 6


@pytest.mark.parametrize(
    ("dialect", "release", "options", "client", "error", "message"),
    [
        ("vllm", "0.17.1", {}, {}, ServerTooOldError, r"0\.24"),
        ("sglang", "0.5.18", {}, {}, ServerTooOldError, r"0\.5\.20"),
        ("sglang", "0.5.20", {}, {"pause_mode": "recompute"}, ServerTooOldError, r"0\.5\.22"),
        ("vllm", None, {"dev_mode": False}, {}, ServerSetupError, "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", None, {"lora": False}, {"way": "adapter"}, ServerSetupError, "ALLOW_RUNTIME_LORA"),
        ("sglang", None, {"lora": False}, {"way": "adapter"}, ServerSetupError, "--enable-lora"),
        ("vllm", None, {"api_key": "k"}, {}, ServerSetupError, "API key"),
        ("sglang", None, {"api_key": "k"}, {"api_key": "wrong"}, ServerSetupError, "API key"),
        ("sglang", None, {"admin_api_key": "a"}, {"api_key": "k"}, ServerSetupError, "API key"),
    ],
)
async def test_what_a_server_lacks_is_named(dialect, release, options, client, error, message):
    with (
        InferenceServer(dialect, release, **options) as server,
        pytest.raises(error, match=message) as caught,
    ):
        async with ServerClient(server.url, dialect, **client):
            pass
    assert str(caught.value).startswith(f"{server.url}: "), "of several servers it says which"


@BOTH
async def test_the_other_dialect_is_recognised(dialect):
    other = "sglang" if dialect == "vllm" else "vllm"
    with InferenceServer(dialect) as server, pytest.raises(ServerSetupError, match="is it"):
        await ServerClient(server.url, other).connect()


@BOTH
async def test_who_only_looks_changes_nothing(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with ServerClient(server.url, dialect, way="broadcast", carrier=GlooCarrier(dialect)) as client:
            await client.sync(Weights(1), 1)
            await client.pause("keep")
            await client._link.converse(client._link.dialect.begin_update())
            before = server.state()
            passer_by = ServerClient(server.url, dialect, way="broadcast")
            seen = await passer_by.look()
            await passer_by.close()
            assert server.state() == before
            assert before["session"]
            assert before["paused"] is not None
            assert (seen.server, seen.model) == (client.capabilities.server, client.capabilities.model)
            assert (seen.release, seen.max_length) == (
                client.capabilities.release,
                client.capabilities.max_length,
            )


@BOTH
async def test_keys_open_what_they_guard(dialect, tmp_path):
    keys = {"api_key": "k"} if dialect == "vllm" else {"api_key": "k", "admin_api_key": "a"}
    with InferenceServer(dialect, **keys) as server:
        async with ServerClient(server.url, dialect, **keys) as client:
            await client.sync(Weights(1, tmp_path), 1)
            assert (await client.generate(request())).policy_versions == [1] * 6
