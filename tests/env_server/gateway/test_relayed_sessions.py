"""What a gateway keeps of the sessions that it passes on, and what of them waits for what."""

import asyncio
import time

import numpy as np

from rollgym.clients.protocol.values import encode_value
from tests.support.client_server import ServerProcess, proxy_before
from tests.support.wire import ENVS, INLINE, Server

_GATEWAY = ("--gateway", "--allow-network", "loopback")


async def until_replicas(gateway: Server, env_id: str, count: int) -> None:
    async with gateway.http() as http, asyncio.timeout(60):
        while (await http.get(f"/v1/envs/{env_id}")).json().get("replicas") != count:
            await asyncio.sleep(0.05)


async def test_options_of_arrays_outlive_their_node() -> None:
    with Server(*_GATEWAY) as gateway:
        arguments = (*ENVS, *INLINE, "--register", gateway.url, "--log-level", "error")
        with ServerProcess(arguments) as first:
            await until_replicas(gateway, "Count", 1)
            async with gateway.socket(binary=True) as socket:
                options = encode_value(None, {"array": np.array([1.5, np.nan])}, binary=True)
                begun = await socket.call("make", env_id="Count", reset={"seed": 1, "options": options})
                again = await socket.call("make", env_id="Count")
                reset = {"session_id": again["session_id"], "seed": 1, "options": options}
                assert (await socket.call("reset", **reset))["step"] == 0
                with ServerProcess(arguments):
                    await until_replicas(gateway, "Count", 2)
                    first.kill()
                    for session_id in (begun["session_id"], again["session_id"]):
                        step = await socket.ask("step", session_id=session_id, action="a", step=0)
                        assert step["ok"]["step"] == 1, step


async def test_who_gives_up_what_runs_does_not_wait_for_it() -> None:
    with ServerProcess((*ENVS, *INLINE)) as node, Server(*_GATEWAY) as gateway:
        async with proxy_before(node) as proxy, gateway.http() as http, gateway.socket() as socket:
            body = {"env_id": "SlowCount", "url": proxy.url, "protocol": "rollgym", "ttl_s": 600}
            assert (await http.post("/v1/envs", json=body)).status_code == 201
            made = await socket.make("SlowCount")
            step = await socket.send("step", session_id=made, action="sleep 15", episode=0, step=0)
            await asyncio.sleep(0.5)
            # The gateway asks again for what it does not know the answer of.
            proxy.cut()
            await asyncio.sleep(1.5)
            begun = time.monotonic()
            assert await socket.call("cancel", session_id=made) == {}
            assert time.monotonic() - begun < 5
            assert (await socket.answer(step))["error"]["code"] == "step_timeout"
            assert time.monotonic() - begun < 5
