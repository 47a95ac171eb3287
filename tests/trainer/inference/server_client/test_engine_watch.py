"""Engines that hang behind a front that answers."""

import asyncio

import pytest

from rollgym.trainer.inference.errors import ServerGoneError
from rollgym.trainer.inference.server_client import http
from rollgym.trainer.inference.server_client.client import ServerClient
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import BOTH, GENERATE, UPDATE_OF, Weights, logprobs_of, request

ENGINE = {"vllm": "/is_sleeping", "sglang": "/server_info"}


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(http, "_ENGINE_S", 1.0)


def client_of(server, dialect):
    return ServerClient(server.url, dialect, patience_s=0.5, watch_every_s=0.1)


def hang(server, dialect, path, seconds):
    """Let the engine answer nothing for a while: what is asked of it by `path`, and what the watch asks."""
    server.fail(
        {"kind": "late", "path": path, "seconds": seconds},
        {"kind": "late", "path": ENGINE[dialect], "seconds": seconds, "count": -1},
    )


@BOTH
async def test_an_engine_that_hangs_behind_its_front_is_given_up(dialect):
    with InferenceServer(dialect) as server:
        async with asyncio.timeout(30), client_of(server, dialect) as client:
            hang(server, dialect, GENERATE[dialect], 60.0)
            with pytest.raises(ServerGoneError, match=r"the engine behind .* for 1 s"):
                await client.generate(request())


@BOTH
async def test_a_reply_that_takes_long_is_waited_for_where_the_engine_answers(dialect):
    with InferenceServer(dialect) as server:
        async with asyncio.timeout(30), client_of(server, dialect) as client:
            server.fail({"kind": "late", "path": GENERATE[dialect], "seconds": 3.0})
            assert len((await client.generate(request())).token_ids) == 6


@BOTH
async def test_an_engine_that_takes_weights_may_answer_nothing_else(dialect, tmp_path):
    with InferenceServer(dialect) as server:
        async with asyncio.timeout(30), client_of(server, dialect) as client:
            hang(server, dialect, UPDATE_OF[dialect], 3.0)
            await client.sync(Weights(1, tmp_path), 1)
            result = await client.generate(request())
            assert result.logprobs == pytest.approx(logprobs_of(1, result.token_ids))


async def test_a_server_without_a_route_to_its_engine_is_waited_for():
    with InferenceServer("vllm", dev_mode=False) as server:
        client = ServerClient(server.url, "vllm", way=None, patience_s=0.5, watch_every_s=0.1)
        async with asyncio.timeout(30), client:
            server.fail({"kind": "late", "path": GENERATE["vllm"], "seconds": 3.0})
            assert len((await client.generate(request())).token_ids) == 6
