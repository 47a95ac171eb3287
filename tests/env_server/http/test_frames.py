"""Bad frames by the thousand: a server answers each as the protocol says, and is as it was afterwards.

`ROLLGYM_FUZZ_MESSAGES=100000 pytest tests/env_server/http/test_frames.py` sends more; `ROLLGYM_FUZZ_SEED` sends others.
"""

import asyncio
import os
from collections.abc import Iterator

import httpx
import pytest

from tests.support.bad_frames import Fuzz, resident_mib
from tests.support.wire import ENVS, INLINE, Server

MESSAGES = int(os.environ.get("ROLLGYM_FUZZ_MESSAGES", "1500"))
SEED = int(os.environ.get("ROLLGYM_FUZZ_SEED", "1"))
LIMITS = ("--linger-s", "0.5", "--max-sessions", "200", "--step-timeout-s", "5")
SERVED = (
    *("--env", "Threaded=tests.support.served_envs:Chance", "--isolation", "Threaded=thread"),
    *ENVS,
    *INLINE,
)
ENV_IDS = ("Count", "Arrays", "SlowCount", "Threaded")
# The observations of `Arrays` hold NaN, which no probe finds equal.
RELAYED = ("Count", "SlowCount", "Threaded")


@pytest.fixture
def node() -> Iterator[Server]:
    with Server(*SERVED, *LIMITS) as server:
        yield server


async def as_it_was(server: Server) -> None:
    """Wait until no session is left, and see that the server works."""
    async with server.http() as client:
        async with asyncio.timeout(120):
            while (await client.get("/v1/info")).json()["capacity"]["sessions"]:
                await asyncio.sleep(0.05)
        assert 'code="internal"' not in (await client.get("/metrics")).text
    async with server.socket() as socket:
        assert await socket.call("ping") == {}
    assert "failed inside the server" not in server.log()


async def test_frames_to_a_server(node: Server) -> None:
    fuzz = Fuzz(node, SEED, ENV_IDS)
    await fuzz.run(MESSAGES // 3)
    await as_it_was(node)
    before = resident_mib(node.process.pid)
    await fuzz.run(MESSAGES)
    await as_it_was(node)
    assert resident_mib(node.process.pid) - before < 64
    assert fuzz.codes["ok"] > 50, "some frames were right"
    assert {"invalid_request", "unknown_op", "session_gone", "not_stateless"} & set(fuzz.codes)
    async with node.socket() as socket:
        for env_id in ENV_IDS:
            made = await socket.make(env_id)
            await socket.call("close", session_id=made)


async def test_frames_to_a_gateway(node: Server) -> None:
    with Server("--gateway", "--allow-network", "loopback", *LIMITS) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=90) as client:
            for env_id in (*RELAYED, "Equal"):
                body = {"env_id": env_id, "url": node.url, "protocol": "rollgym", "ttl_s": 3600}
                assert (await client.post("/v1/envs", json=body)).status_code == 201
        fuzz = Fuzz(gateway, SEED, RELAYED)
        await fuzz.run(MESSAGES)
        await as_it_was(gateway)
        assert fuzz.codes["ok"] > 20
    await as_it_was(node)
