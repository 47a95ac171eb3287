"""Connections to a node that break: who asked has an answer, and everybody else is answered meanwhile."""

from collections.abc import Iterator

import pytest

from tests.support.client_server import ENVS, ServerProcess
from tests.support.encoding_proxy import encoding_proxy
from tests.support.redis_server import RedisServer
from tests.support.wire import Server

_GATEWAY = ("--gateway", "--allow-network", "loopback")


@pytest.fixture(scope="module")
def node() -> Iterator[ServerProcess]:
    with ServerProcess(("--no-builtin", *ENVS, "--log-level", "error")) as running:
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
