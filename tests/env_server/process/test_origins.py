"""What pages of other sites cannot do, though a browser would carry it out for them."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.tokens import add_token
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.common.settings_loading import load_settings
from rollgym.env_server.process.app import Origins
from tests.support.wire import ENVS, INLINE, Server

LAB = "https://lab.example"


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    with Server(*ENVS, *INLINE, "--allowed-origins", LAB) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    token = add_token(file, "alice", ["play"])
    with Server(*ENVS, *INLINE, "--token-file", str(file)) as running:
        yield running, token


async def sessions(server: Server) -> int:
    async with server.http() as client:
        return int((await client.get("/v1/info")).json()["capacity"]["sessions"])


async def test_a_form_of_another_site_makes_no_session(open_server: Server) -> None:
    before = await sessions(open_server)
    body = b'{"env_id": "Count", "reset": {}}'
    async with open_server.http() as client:
        for headers in (
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/json"},
            {},  # what `fetch` sends of a body that has no type
        ):
            foreign = {**headers, "Origin": "https://evil.example"}
            answer = await client.post("/v1/sessions", content=body, headers=foreign)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
            assert "allowed_origins" in answer.json()["detail"]
        assert (
            await client.post("/v1/sessions", content=body, headers={"Origin": "null"})
        ).status_code == 403
        for path in ("/v1/envs", "/metrics", "/health", "/nowhere"):
            assert (await client.get(path, headers={"Origin": "http://evil.example"})).status_code == 403
        assert await sessions(open_server) == before
        own = await client.post("/v1/sessions", content=body, headers={"Origin": open_server.url})
        assert own.status_code == 201
        await client.delete(f"/v1/sessions/{own.json()['session_id']}")


async def test_a_socket_of_another_site_is_refused(open_server: Server, guarded: tuple[Server, str]) -> None:
    for server, origin, status in (
        (open_server, "https://evil.example", 403),
        (open_server, f"http://localhost:{open_server.port}", 403),
        (open_server, "http://127.0.0.1:1", 403),
        (open_server, f"https://127.0.0.1:{open_server.port}.evil.example", 403),
        (guarded[0], "https://evil.example", 403),
        (guarded[0], LAB, 403),
    ):
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(origin=origin):
                pass
        assert refused.value.response.status_code == status
    for origin in (open_server.url, LAB, None):
        async with open_server.socket(origin=origin) as socket:
            assert await socket.call("ping") == {}


async def test_a_name_that_was_given_this_address_gets_nowhere(open_server: Server) -> None:
    async with open_server.http() as client:
        for host in (
            "evil.example",
            f"evil.example:{open_server.port}",
            "127.evil.example",
            "0.0.0.0",
            "[2001:db8::1]",
            "localhost.",
            "",
        ):
            rebound = {"Host": host, "Origin": f"http://{host}"}
            assert (await client.get("/v1/envs", headers=rebound)).status_code == 403
            answer = await client.get("/v1/envs", headers={"Host": host})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert (await client.get("/v1/envs", headers={"Host": "a b:c"})).status_code == 400, "no name at all"
        for host in (
            "localhost",
            "localhost:9",
            "127.0.0.1",
            "127.3.2.1:80",
            "[::1]:8000",
            "lab.example:443",
        ):
            assert (await client.get("/v1/envs", headers={"Host": host})).status_code == 200


def test_a_name_that_was_let_in_lets_no_other_in() -> None:
    origins = Origins([], loopback_only=True)
    for _ in range(2):
        for host in ("", "evil.example"):
            with pytest.raises(ProblemError, match="forbidden"):
                origins.check({"host": host})
        origins.check({"host": "localhost"})
        origins.check({"host": "localhost"})
        origins.check({})
        with pytest.raises(ProblemError, match="forbidden"):
            origins.check({"host": "localhost", "origin": "https://evil.example"})


async def test_with_tokens_any_name_may_be_given(guarded: tuple[Server, str]) -> None:
    server, token = guarded
    async with server.http(token) as client:
        assert (await client.get("/v1/envs", headers={"Host": "rollgym.example"})).status_code == 200
        own = {"Host": "rollgym.example", "Origin": "https://rollgym.example"}
        assert (await client.get("/v1/envs", headers=own)).status_code == 200
        foreign = {"Host": "rollgym.example", "Origin": "https://evil.example"}
        assert (await client.get("/v1/envs", headers=foreign)).status_code == 403


def test_old_clients_that_name_no_host_are_served(open_server: Server) -> None:
    with socket.create_connection(("127.0.0.1", open_server.port)) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}(\.[a-z]{2,5}){0,2}", fullmatch=True)
PORTS = st.none() | st.integers(1, 65535)


def authority(name: str, port: int | None) -> str:
    return name if port is None else f"{name}:{port}"


@given(st.sampled_from(["http", "https"]), NAMES, PORTS, NAMES, PORTS)
def test_only_the_same_name_and_port_are_the_same_site(
    scheme: str, name: str, port: int | None, other: str, other_port: int | None
) -> None:
    origins = Origins([], loopback_only=False)
    default = {"http": 80, "https": 443}[scheme]
    headers = {"origin": f"{scheme}://{authority(name, port)}", "host": authority(other, other_port)}
    if (name, port or default) == (other, other_port or default):
        origins.check(headers)
    else:
        with pytest.raises(ProblemError) as refused:
            origins.check(headers)
        assert refused.value.code == "forbidden"


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_taken_or_refused(origin: str, host: str) -> None:
    for loopback_only in (True, False):
        with contextlib.suppress(ProblemError):
            Origins([LAB], loopback_only=loopback_only).check({"origin": origin, "host": host})


@pytest.mark.parametrize("origin", ["lab.example", "https://lab.example/page", "*", "null", "https://"])
def test_what_is_no_origin_is_told_at_the_start(origin: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="allowed_origins"):
        load_settings({"allowed_origins": [origin]}, None)


def test_httpx_and_other_programs_send_no_origin(open_server: Server) -> None:
    assert "origin" not in httpx.get(f"{open_server.url}/v1/envs").request.headers
