"""Tokens between clients, gateways and nodes."""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import add_token
from tests.support.client_server import ENVS, ServerProcess
from tests.support.foreign_servers import ForeignServer

QUIET = ("--log-level", "error")


class Fleet(NamedTuple):
    """A gateway and a node, each with tokens of its own, and the gateway's tokens by name."""

    gateway: ServerProcess
    node: ServerProcess
    tokens: dict[str, str]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    place = tmp_path_factory.mktemp("tokens")
    roles = {"player": "play", "other": "play", "node": "register", "author": "register", "root": "admin"}
    tokens = {name: add_token(place / "gateway.yaml", name, [role]) for name, role in roles.items()}  # type: ignore[list-item]
    (place / "register").write_text(tokens["node"] + "\n")
    (place / "play").write_text(add_token(place / "node.yaml", "gateway", ["play"]))
    arguments = (
        "--gateway",
        "--allow-network",
        "loopback",
        "--token-file",
        str(place / "gateway.yaml"),
        *QUIET,
    )
    with ServerProcess(arguments) as gateway:
        node_arguments = (
            *("--register", gateway.url, "--register-token-file", str(place / "register")),
            *("--token-file", str(place / "node.yaml"), "--node-token-file", str(place / "play")),
        )
        with ServerProcess((*ENVS, *node_arguments, *QUIET)) as node:
            yield Fleet(gateway, node, tokens)


def headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def wait_for(fleet: Fleet, env_id: str) -> None:
    async with EnvClient(fleet.gateway.url, token=fleet.tokens["player"]) as client, asyncio.timeout(90):
        while all(env.env_id != env_id for env in await client.envs()):
            await asyncio.sleep(0.05)


async def test_each_uses_its_own_token(fleet: Fleet) -> None:
    await wait_for(fleet, "Walk-v0")
    async with EnvClient(fleet.gateway.url, token=fleet.tokens["player"]) as client:
        session = await client.make("Walk-v0")
        await session.reset(seed=1)
        assert (await session.step("a")).observation
    with pytest.raises(ProblemError, match="unauthorized"):
        async with EnvClient(fleet.node.url, token=fleet.tokens["player"]):
            pass


async def test_a_session_is_its_tokens_own_behind_a_gateway_too(fleet: Fleet) -> None:
    await wait_for(fleet, "Walk-v0")
    async with EnvClient(fleet.gateway.url, token=fleet.tokens["player"]) as client:
        session = await client.make("Walk-v0")
        async with httpx.AsyncClient(
            base_url=fleet.gateway.url, headers=headers(fleet.tokens["other"])
        ) as other:
            answer = await other.post(f"/v1/sessions/{session.session_id}/reset", json={})
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_session")


async def test_registrations_need_the_role_and_are_their_tokens_own(fleet: Fleet) -> None:
    body = {"env_id": "Guess", "protocol": "http"}
    with ForeignServer("python") as server:
        async with httpx.AsyncClient(base_url=fleet.gateway.url, timeout=60) as http:
            asked = {**body, "url": server.url}
            for name, status in ((None, 401), ("player", 403)):
                sent = {} if name is None else headers(fleet.tokens[name])
                assert (await http.post("/v1/envs", json=asked, headers=sent)).status_code == status
            made = await http.post("/v1/envs", json=asked, headers=headers(fleet.tokens["author"]))
            assert made.status_code == 201
            again = await http.post("/v1/envs", json=asked, headers=headers(fleet.tokens["node"]))
            assert (again.status_code, again.json()["code"]) == (403, "forbidden")
            path = f"/v1/registrations/{made.json()['registration_id']}"
            for name, status in (("node", 404), ("player", 403), ("author", 200)):
                beat = await http.post(f"{path}/heartbeat", json={}, headers=headers(fleet.tokens[name]))
                assert beat.status_code == status, name
            assert (await http.delete(path, headers=headers(fleet.tokens["root"]))).status_code == 204
