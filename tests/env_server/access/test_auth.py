"""Tokens, roles and ownership."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import websockets
import yaml

from rollgym.env_server.access.tokens import Tokens, add_token
from rollgym.env_server.cli import main
from rollgym.env_server.common.settings import ConfigurationError
from tests.support.wire import ENVS, INLINE, Server, Socket

Named = dict[str, str]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Named]]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    tokens = {
        "alice": add_token(file, "alice", ["play"]),
        "bob": add_token(file, "bob", ["play"]),
        "node": add_token(file, "node", ["register"]),
        "root": add_token(file, "root", ["admin"]),
    }
    assert not any(token in file.read_text() for token in tokens.values()), "only hashes are kept"
    with Server(*ENVS, *INLINE, "--token-file", str(file)) as server:
        yield server, tokens


async def test_http_needs_a_token(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    async with server.http() as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Digest x"},
            {"Authorization": ""},
        ):
            answer = await client.get("/v1/envs", headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
            assert answer.headers["www-authenticate"].startswith("Bearer")
        basic = base64.b64encode(f"any:{tokens['alice']}".encode()).decode()
        assert (await client.get("/v1/envs", headers={"Authorization": f"Basic {basic}"})).status_code == 200
        for path in ("/health", "/ready", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, "nothing to hide"


async def test_a_first_frame_that_is_long_is_refused_unread(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    for content in (
        "[" * 500_000,
        '{"id": 1, "op": "auth", "token": "' + tokens["alice"] + " " * 20_000 + '"}',
    ):
        async with server.socket() as socket:
            await socket.connection.send(content)
            problem = (await socket.receive())["error"]
            assert (problem["code"], "at most" in problem["detail"]) == ("unauthorized", True)
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await socket.receive()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008


async def test_roles(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    for name, plays, sees_metrics in (("alice", True, False), ("node", False, False), ("root", True, True)):
        async with server.http(tokens[name]) as client:
            assert ((await client.get("/v1/info")).status_code == 200) is plays
            metrics = await client.get("/metrics")
            assert (metrics.status_code == 200) is sees_metrics
            if not sees_metrics:
                assert metrics.json()["code"] == "forbidden"


async def test_a_session_is_its_tokens_own(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    async with server.http(tokens["alice"]) as alice, server.http(tokens["bob"]) as bob:
        made = (await alice.post("/v1/sessions", json={"env_id": "Count", "reset": {}})).json()["session_id"]
        path = f"/v1/sessions/{made}"
        calls = (
            *(("GET", suffix) for suffix in ("", "/episode")),
            *(("POST", suffix) for suffix in ("/step", "/reset", "/render", "/cancel", "/fork")),
        )
        for method, suffix in calls:
            body = {"action": "a"} if suffix == "/step" else None
            answer = await bob.request(method, path + suffix, json=body)
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_session"), suffix
        seen_by_bob = (await bob.get("/v1/sessions")).json()["sessions"]
        assert made not in {each["session_id"] for each in seen_by_bob}
        assert {each["owner"] for each in seen_by_bob} <= {"bob"}
        assert (await bob.delete(path)).status_code == 204
        assert (await bob.post("/v1/sessions/close", json={"session_ids": [made]})).json() == {"closed": 0}
        assert (await alice.post(f"{path}/step", json={"action": "a"})).json()["step"] == 1, "untouched"
        headers = {"Authorization": f"Bearer {tokens['alice']}"}
        async with server.socket(additional_headers=headers) as socket:
            assert (await socket.call("step", session_id=made, action="b"))["step"] == 2, "on any transport"
        async with server.http(tokens["root"]) as root:
            listed = (await root.get("/v1/sessions")).json()["sessions"]
            assert [each["owner"] for each in listed if each["session_id"] == made] == ["alice"]
        await alice.delete(path)
        assert (await bob.get(path)).json()["code"] == "unknown_session", "not even that it was there"


async def test_request_ids_are_their_tokens_own(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    made = []
    for name in ("alice", "bob"):
        async with server.http(tokens[name]) as client:
            answer = await client.post("/v1/sessions", json={"env_id": "Count", "request_id": "same"})
            made.append(answer.json()["session_id"])
    assert made[0] != made[1]


async def test_the_handshake_takes_the_header(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    for name, status in (("wrong", 401), ("node", 403)):
        token = tokens.get(name, name)
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with server.socket(additional_headers={"Authorization": f"Bearer {token}"}):
                raise AssertionError("the handshake went through")
        assert refused.value.response.status_code == status
        assert refused.value.response.headers["content-type"] == "application/problem+json"
    assert server.log() == "", "a refusal is no error of the server"
    basic = base64.b64encode(f":{tokens['alice']}".encode()).decode()
    async with server.socket(additional_headers={"Authorization": f"Basic {basic}"}) as socket:
        assert await socket.call("ping") == {}


@pytest.mark.parametrize("binary", [False, True], ids=["json", "msgpack"])
async def test_the_first_frame_may_hold_the_token(guarded: tuple[Server, Named], binary: bool) -> None:
    server, tokens = guarded
    async with server.socket(binary=binary) as socket:
        assert await socket.call("auth", token=tokens["alice"]) == {}
        assert await socket.call("ping") == {}
    for first in (
        {"op": "ping"},
        {"op": "auth", "token": "wrong"},
        {"op": "auth"},
        {"op": "auth", "token": 5},
    ):
        async with server.socket(binary=binary) as socket:
            assert (await socket.ask(**first))["error"]["code"] == "unauthorized"
            await closed(socket, 1008)


async def test_a_later_frame_tells_what_a_token_is_worth(guarded: tuple[Server, Named]) -> None:
    server, tokens = guarded
    async with server.socket(additional_headers={"Authorization": f"Bearer {tokens['alice']}"}) as socket:
        made = await socket.make()
        for token, code in (("wrong", "unauthorized"), (tokens["bob"], "forbidden"), (5, "invalid_request")):
            assert (await socket.ask("auth", token=token))["error"]["code"] == code
        assert await socket.call("auth", token=tokens["alice"]) == {}
        assert (await socket.call("session", session_id=made))["owner"] == "alice", "it stays hers"


async def closed(socket: Socket, code: int) -> None:
    with pytest.raises(websockets.ConnectionClosed) as end:
        await socket.connection.recv()
    assert end.value.rcvd is not None
    assert end.value.rcvd.code == code


def test_without_tokens_only_loopback_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--host", "0.0.0.0", "--port", "0"])
    assert end.value.code == 2
    assert "loopback" in capsys.readouterr().err


def test_token_files_are_strict(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    token = add_token(file, "one", ["play", "register"])
    assert file.stat().st_mode & 0o077 == 0
    assert Tokens.load(file).caller(token).roles == {"play", "register"}
    with pytest.raises(ConfigurationError, match="named 'one' already"):
        add_token(file, "one", ["play"])
    with pytest.raises(ConfigurationError):
        add_token(file, "white space", ["play"])
    entry = yaml.safe_load(file.read_text())["tokens"][0]
    for change in ({"sha256": token}, {"roles": ["king"]}, {"roles": []}, {"token": token}):
        file.write_text(yaml.safe_dump({"tokens": [{**entry, **change}]}))
        with pytest.raises(ConfigurationError):
            Tokens.load(file)
    for text in ("tokens: []", "", "[", "tokens: 3"):
        file.write_text(text)
        with pytest.raises(ConfigurationError):
            Tokens.load(file)


def test_the_token_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.yaml"
    assert main(["token", "--file", str(file), "--name", "me", "--role", "admin"]) == 0
    token = capsys.readouterr().out.strip()
    assert Tokens.load(file).caller(token).is_admin
