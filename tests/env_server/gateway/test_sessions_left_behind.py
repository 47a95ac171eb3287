"""A session that went on elsewhere ends where it was, whenever its old node is heard of again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.support.client_server import ENVS, Proxy, ServerProcess, proxy_before

QUIET = ("--log-level", "error")
GATEWAY = ("--gateway", "--allow-network", "loopback", *QUIET)
NODE = ("--no-builtin", *ENVS, *QUIET)


class Wire:
    """The way to a node, which is there or is not."""

    def __init__(self, target_port: int) -> None:
        self._proxy = Proxy(target_port)
        self._port = 0
        self._listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def mend(self) -> None:
        self._listener = await asyncio.start_server(self._proxy.serve, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    def cut(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._proxy.cut()


@asynccontextmanager
async def wire_to(node: ServerProcess) -> AsyncIterator[Wire]:
    wire = Wire(node.port)
    await wire.mend()
    try:
        yield wire
    finally:
        wire.cut()


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["heartbeat", "registration"])
async def test_a_node_that_is_heard_of_again_keeps_nothing(sign: str) -> None:
    with ServerProcess(GATEWAY) as gateway, ServerProcess(NODE) as first, ServerProcess(NODE) as second:
        async with wire_to(first) as wire, httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:

            async def register(url: str) -> str:
                body = {"env_id": "Walk-v0", "url": url, "protocol": "rollgym", "ttl_s": 600}
                answer = await http.post("/v1/envs", json=body)
                assert answer.status_code == 201, answer.text
                return str(answer.json()["registration_id"])

            registration_id = await register(wire.url)
            made = (await http.post("/v1/sessions", json={"env_id": "Walk-v0", "reset": {"seed": 1}})).json()
            await register(second.url)
            wire.cut()
            step = {"action": "a", "episode": 0, "step": 0}
            answer = await http.post(f"/v1/sessions/{made['session_id']}/step", json=step)
            assert answer.status_code == 200, answer.text
            assert await sessions_at(first) == 1
            # Its server never went away, and nobody registers it anew because of this.
            await wire.mend()
            if sign == "heartbeat":
                await http.post(f"/v1/registrations/{registration_id}/heartbeat", json={})
            else:
                await http.delete(f"/v1/registrations/{registration_id}")
                await register(wire.url)
            async with asyncio.timeout(20):
                while await sessions_at(first):
                    await asyncio.sleep(0.05)
            assert await sessions_at(second) == 1


async def sessions_at(node: ServerProcess) -> int:
    async with httpx.AsyncClient() as http:
        return int((await http.get(f"{node.url}/v1/info")).json()["capacity"]["sessions"])


@pytest.mark.slow
@pytest.mark.parametrize("op", ["make", "fork"])
async def test_what_a_node_opened_and_could_not_say_is_ended(op: str) -> None:
    with ServerProcess(GATEWAY) as gateway, ServerProcess(NODE) as node:
        async with proxy_before(node) as proxy, httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            body = {"env_id": "Walk-v0", "url": proxy.url, "protocol": "rollgym", "ttl_s": 600}
            assert (await http.post("/v1/envs", json=body)).status_code == 201
            begin = {"env_id": "Walk-v0", "reset": {"seed": 1}}
            made = (await http.post("/v1/sessions", json=begin)).json()
            lost = asyncio.create_task(proxy.lose_next_reply())
            if op == "make":
                answer = await http.post("/v1/sessions", json=begin | {"count": 3})
            else:
                answer = await http.post(f"/v1/sessions/{made['session_id']}/fork", json={"count": 3})
            await lost
            known = 1 + (3 if answer.is_success else 0)
            async with asyncio.timeout(20):
                while await sessions_at(node) != known:
                    await asyncio.sleep(0.05)
