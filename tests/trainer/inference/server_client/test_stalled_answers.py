"""Answers that begin and never end, of servers that live: they are given up, and asked for elsewhere."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rollgym.trainer.inference.calls import HttpCall
from rollgym.trainer.inference.errors import ServerGoneError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_client.connections import ResponseProgress
from rollgym.trainer.inference.server_client.http import ServerHttp
from rollgym.trainer.inference.server_pool.pool import ServerPool
from tests.support.inference_server.running import InferenceServer
from tests.support.server_weights import BOTH, GENERATE, Weights, request

STALLED = r"has begun an answer, and brought nothing new of it for 0\.1 s \(inference\.stalled_after_s\)"
DRIPS = {"kind": "drip", "seconds": 0.02, "count": -1}
_ALIVE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"


def client_of(server, dialect, **options):
    return ServerClient(
        server.url, dialect, patience_s=20.0, watch_every_s=0.05, stalled_after_s=0.1, **options
    )


@BOTH
@pytest.mark.parametrize("streams", [False, True])
async def test_a_reply_that_drips_for_ever_is_given_up(dialect, streams):
    options = {"incremental": True} if dialect == "sglang" else {}
    with InferenceServer(dialect, **options) as server:
        async with asyncio.timeout(30), client_of(server, dialect, way=None) as client:
            server.fail(DRIPS | {"path": GENERATE[dialect]})
            asked = replace(request(), on_tokens=lambda ids: None) if streams else request()
            with pytest.raises(ServerGoneError, match=STALLED):
                await client.generate(asked)
            server.fail()
            assert len((await client.generate(request())).token_ids) == 6


async def test_a_reply_that_drips_goes_on_at_another_server(tmp_path):
    said = []
    with InferenceServer("vllm") as one, InferenceServer("vllm") as other:
        clients = {"one": client_of(one, "vllm"), "other": client_of(other, "vllm")}
        pool = ServerPool(clients, max_concurrent=8, patience_s=20.0, look_every_s=30.0, say=said.append)
        async with asyncio.timeout(30), pool:
            await pool.sync(Weights(1, tmp_path), 1)
            one.fail(DRIPS | {"path": GENERATE["vllm"]})
            assert len((await pool.generate(request())).token_ids) == 6
            assert pool.serving == ["other"]
    assert [line.split(" (")[0] for line in said] == ["inference server one is gone"]


@asynccontextmanager
async def dripping(begins: bytes, drop: bytes):
    """A server that says that it lives, and begins an answer to all else."""

    async def serve(reader, writer):
        while asked := await reader.readuntil(b"\r\n\r\n"):
            if asked.startswith(b"GET /health"):
                writer.write(_ALIVE)
                continue
            writer.write(begins)
            gone = asyncio.ensure_future(reader.read())
            while not gone.done():
                writer.write(drop)
                await asyncio.sleep(0.02)
            break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("begins", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Filler: ", b"x"),
        (_HEAD + b"\r\n", b"1\r\n \r\n"),
        (_HEAD + b"\r\n1\r\n{\r\n", b""),
        (b"HTTP/1.1 500 Error\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
    ids=["head", "body", "nothing more", "an error"],
)
async def test_whatever_drips_is_given_up(begins, drop, streams):
    async with asyncio.timeout(30), dripping(begins, drop) as url:
        http = ServerHttp(
            url,
            api_key=None,
            admin_api_key=None,
            patience_s=20.0,
            watch_every_s=0.05,
            stalled_after_s=0.1,
        )
        try:
            reading = (lambda on_news: lambda part: None) if streams else None
            with pytest.raises(ServerGoneError, match=STALLED):
                await http.call(HttpCall("/generate", {}), reading=reading)
        finally:
            await http.close()


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_what_brings_something_new_or_is_held_has_not_stalled():
    clock, held = Clock(), []
    arrival = ResponseProgress(lambda: bool(held), clock)
    clock.now += 1000
    assert not arrival.stalled(5.0, steered=False), "a server may take its time before it answers"
    arrival.begin()
    clock.now += 4
    arrival.begin()
    clock.now += 1
    assert arrival.stalled(5.0, steered=False), "more of the same is no news"
    arrival.news()
    clock.now += 4
    assert not arrival.stalled(5.0, steered=False)
    for steered in (True, False):
        held[:] = [] if steered else [1]
        clock.now += 1000
        assert not arrival.stalled(5.0, steered=steered), "paused or steered it need not go on"
    held.clear()
    clock.now += 4
    assert not arrival.stalled(5.0, steered=False)
    clock.now += 1
    assert arrival.stalled(5.0, steered=False)
    arrival.wait()
    clock.now += 1000
    assert not arrival.stalled(5.0, steered=False), "the first token of a stream waits for those of others"


@BOTH
async def test_a_stream_whose_tokens_come_is_waited_for(dialect):
    options = {"incremental": True} if dialect == "sglang" else {}
    with InferenceServer(dialect, **options) as server:
        client = ServerClient(server.url, dialect, way=None, watch_every_s=0.02, stalled_after_s=0.4)
        async with asyncio.timeout(30), client:
            server.steps(0)
            told = []
            asked = replace(request(), on_tokens=told.extend)
            running = asyncio.create_task(client.generate(asked))
            await server.until(waiting=1)
            await asyncio.sleep(0.6)  # longer than it may stall, and its head has come
            assert not running.done()
            server.steps(None)
            assert (await running).token_ids == told
