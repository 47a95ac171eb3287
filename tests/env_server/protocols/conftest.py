import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollgym.env_server.access.tokens import add_token
from tests.support.wire import ENVS, INLINE, Server


@pytest.fixture(scope="package")
def plain() -> Iterator[Server]:
    """A server with the test environments, for tests that leave it as it was."""
    with Server(*ENVS, *INLINE, "--env-step-timeout-s", "SlowCount=20", "--processes", "2") as running:
        yield running
        assert "failed inside the server" not in running.log()


@pytest.fixture(scope="package")
def relayed() -> Iterator[Server]:
    """A gateway before a node with the test environments."""
    with Server("--gateway", "--allow-network", "loopback") as gateway:
        with Server(*ENVS, *INLINE, "--register", gateway.url):
            asyncio.run(_listed(gateway, "Count"))
            yield gateway
        assert "failed inside the server" not in gateway.log()


async def _listed(gateway: Server, env_id: str) -> None:
    async with gateway.http() as client, asyncio.timeout(60):
        while (await client.get(f"/v1/envs/{env_id}")).status_code != 200:
            await asyncio.sleep(0.05)


@pytest.fixture(params=["plain", "relayed"])
def anywhere(request: pytest.FixtureRequest) -> Server:
    """A server that has the environments itself, and a gateway that does not."""
    server: Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="package")
def few_places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    """A server with tokens, and few places."""
    file: Path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens = {name: add_token(file, name, ["play"]) for name in ("alice", "bob")}
    tokens["node"] = add_token(file, "node", ["register"])
    arguments = ("--token-file", str(file), "--max-sessions", "2", "--idle-timeout-s", "2")
    with Server(*ENVS, *INLINE, *arguments) as running:
        yield running, tokens
        assert "failed inside the server" not in running.log()


@pytest.fixture
def guarded(few_places: tuple[Server, dict[str, str]]) -> tuple[Server, dict[str, str]]:
    """A server with tokens and few places, which are all free: what other tests have left there is closed."""
    server, tokens = few_places
    for name in ("alice", "bob"):
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {tokens[name]}"}) as client:
            ids = [each["session_id"] for each in client.get("/v1/sessions").json()["sessions"]]
            if ids:
                client.post("/v1/sessions/close", json={"session_ids": ids}).raise_for_status()
    return few_places
