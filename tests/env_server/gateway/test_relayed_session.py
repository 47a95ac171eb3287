"""Sessions that a gateway passes on: what it keeps, what waits for what, and connections to a node that break."""

import asyncio
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rollgym.clients.protocol.values import encode_value
from tests.support.client_server import ENVS as OF_CLIENTS
from tests.support.client_server import ServerProcess, proxy_before
from tests.support.encoding_proxy import encoding_proxy
from tests.support.redis_server import RedisServer
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


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with ServerProcess(("--no-builtin", *OF_CLIENTS, "--log-level", "error")) as running:
        yield running


@pytest.fixture(scope="module", params=["alone", "with a journal"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if request.param == "alone":
        with Server(*_GATEWAY) as running:
            yield running
        return
    with (
        RedisServer(tmp_path_factory.mktemp("journal")) as journal,
        Server(*_GATEWAY, "--journal-url", journal.url) as running,
    ):
        yield running


async def test_while_a_node_is_connected_to_in_one_encoding_alone_others_are_answered(
    gateway: Server, node: ServerProcess
) -> None:
    async with (
        encoding_proxy(node.port) as proxy,
        gateway.http() as http,
        gateway.socket(binary=True) as socket,
    ):
        body = {"env_id": "Walk-v0", "url": proxy.url, "protocol": "rollgym"}
        registered = (await http.post("/v1/envs", json=body)).json()
        made = (await http.post("/v1/sessions", json={"env_id": "Walk-v0", "reset": {"seed": 1}})).json()
        session_id = made["session_id"]
        proxy.cut_binary()
        number = await socket.send("reset", session_id=session_id, seed=1)
        for _ in range(5):
            assert (await http.get("/health")).status_code == 200
        proxy.takes_binary.set()
        answer = await socket.answer(number)
        assert answer["ok"]["observation"] == made["reset"]["observation"]
        await http.delete(f"/v1/sessions/{session_id}")
        await http.delete(f"/v1/registrations/{registered['registration_id']}")


@pytest.mark.parametrize("beside", [[], [{"op": "ping"}]], ids=["as a whole", "one by one"])
async def test_a_step_whose_answer_finds_no_room_in_a_batch_is_not_taken_twice(
    beside: list[dict[str, str]],
) -> None:
    """Neither where a batch is passed on whole, nor where its operations are; they name no place."""
    with Server(*_GATEWAY) as gateway:
        arguments = (*ENVS, *INLINE, "--register", gateway.url, "--log-level", "error")
        with ServerProcess((*arguments, "--max-reply-bytes", "16384")):
            await until_replicas(gateway, "Count", 1)
            async with gateway.socket() as socket:
                made = (await socket.call("make", env_id="Count", count=2, reset={"seed": 1}))["sessions"]
                step = {"op": "step", "action": "large 12000"}
                ops = [*({**step, "session_id": each["session_id"]} for each in made), *beside]
                number = await socket.send("batch", ops=ops)
                first, second, *_ = (await socket.answer(number))["results"]
                assert first["ok"]["step"] == 1
                described = await socket.call("session", session_id=made[1]["session_id"])
                assert described["step"] == 1
                # What was taken, and has no answer, says so.
                answer = second.get("ok") or second["error"]
                assert answer.get("step", 1) == 1
                assert answer.get("part", "reply") == "reply"
