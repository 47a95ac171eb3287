"""Tokens that change while a server runs."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import websockets
import yaml

from rollgym.env_server.access.tokens import (
    Quota,
    Tokens,
    add_token,
    read_tokens,
    retire_tokens,
    revoke_tokens,
    rotate_token,
)
from rollgym.env_server.cli import main
from rollgym.env_server.common.settings import ConfigurationError
from tests.support.foreign_servers import ForeignServer
from tests.support.wire import ENVS, INLINE, Server, Socket


def bearer(token: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {token}"}}


async def status(server: Server, token: str) -> int:
    async with server.http(token) as client:
        return (await client.get("/v1/info")).status_code


async def reread(server: Server, token: str, expected: int) -> None:
    """Tell a server to read its tokens again, and wait until it has."""
    server.process.send_signal(signal.SIGHUP)
    async with asyncio.timeout(30):
        while await status(server, token) != expected:
            await asyncio.sleep(0.01)


async def closed(socket: Socket) -> None:
    with pytest.raises(websockets.ConnectionClosed) as end:
        async with asyncio.timeout(20):
            await socket.connection.recv()
    assert end.value.rcvd is not None
    assert (end.value.rcvd.code, end.value.rcvd.reason) == (1008, "unauthorized")


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_token_is_revoked(tmp_path: Path, processes: int) -> None:
    file = tmp_path / "tokens.yaml"
    tokens = {name: add_token(file, name, ["play"]) for name in ("alice", "bob")}
    root = add_token(file, "root", ["admin"])
    arguments = ("--token-file", str(file), "--processes", str(processes), "--linger-s", "600")
    with Server(*ENVS, *INLINE, *arguments) as server:
        async with (
            server.socket(**bearer(tokens["alice"])) as alice,
            server.socket(**bearer(tokens["bob"])) as bob,
            server.socket() as late,
            websockets.connect(
                f"ws://127.0.0.1:{server.port}/openenv/Count/ws", **bearer(tokens["alice"])
            ) as openenv,
            server.http(root) as admin,
        ):
            await late.call("auth", token=tokens["alice"])
            hers, his = await alice.make(), await bob.make()
            revoke_tokens(file, "alice")
            add_token(file, "carol", ["play"])
            server.process.send_signal(signal.SIGHUP)
            await closed(alice)
            await closed(late)
            with pytest.raises(websockets.ConnectionClosed):
                async with asyncio.timeout(20):
                    await openenv.recv()
            assert await status(server, tokens["alice"]) == 401
            assert (await bob.call("step", session_id=his, action="a"))["step"] == 1, "nothing to him"
            async with asyncio.timeout(20):
                while [
                    each["session_id"] for each in (await admin.get("/v1/sessions")).json()["sessions"]
                ] != [his]:
                    await asyncio.sleep(0.01)
            assert (await admin.get(f"/v1/sessions/{hers}")).json()["code"] == "session_gone"
            assert (await admin.get("/v1/info")).json()["capacity"]["sessions"] == 1


async def test_no_frame_of_a_revoked_token_is_taken_once_those_before_it_are_done(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    token, root = add_token(file, "alice", ["play"]), add_token(file, "root", ["admin"])
    with Server(*ENVS, *INLINE, "--token-file", str(file), "--max-queue-s", "60") as server:
        async with server.socket(**bearer(token)) as alice, server.http(root) as admin:
            session = await alice.make()
            reset = {"op": "reset", "session_id": session, "options": {"sleep": 0.01}}
            await alice.send("batch", ops=[reset] * 200)
            await alice.send("make", env_id="Count")
            await asyncio.sleep(0.3)
            revoke_tokens(file, "alice")
            server.process.send_signal(signal.SIGHUP)
            await closed(alice)

            async def done(op: str) -> float:
                lines = (await admin.get("/metrics")).text.splitlines()
                counts = [
                    line
                    for line in lines
                    if line.startswith("rollgym_operations_total{") and f'op="{op}"' in line
                ]
                return sum(float(line.rsplit(" ", 1)[1]) for line in counts)

            async with asyncio.timeout(60):
                while await done("reset") < 200:
                    await asyncio.sleep(0.05)
            assert await done("make") == 1


async def test_a_token_is_rotated_without_a_gap(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    old = add_token(file, "alice", ["play"], Quota(max_sessions=2))
    with Server(*ENVS, *INLINE, "--token-file", str(file)) as server:
        async with server.socket(**bearer(old)) as before:
            made = await before.make()
            new = rotate_token(file, "alice")
            await reread(server, new, 200)
            assert (await before.call("step", session_id=made, action="a"))["step"] == 1, "both work"
            async with server.socket(**bearer(new)) as after:
                assert (await after.call("step", session_id=made, action="b"))["step"] == 2, (
                    "a name's sessions"
                )
                retire_tokens(file, "alice")
                await reread(server, old, 401)
                await closed(before)
                assert (await after.call("step", session_id=made, action="c"))["step"] == 3
                await after.make()
                refused = await after.ask("make", env_id="Count")
                assert refused["error"]["limit"] == "max_sessions_per_token", "the quota is the name's, too"


async def test_roles_and_quotas_change_for_open_sockets(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    token = add_token(file, "alice", ["play"])
    probe = add_token(file, "probe", ["play"])
    with Server(*ENVS, *INLINE, "--token-file", str(file)) as server:
        async with server.socket(**bearer(token)) as socket:
            await socket.make()
            content = yaml.safe_load(file.read_text())
            content["tokens"][0]["max_sessions"] = 1
            content["tokens"].pop()
            file.write_text(yaml.safe_dump(content))
            await reread(server, probe, 401)
            assert (await socket.ask("make", env_id="Count"))["error"]["code"] == "at_capacity"
            content["tokens"][0]["roles"] = ["register"]
            file.write_text(yaml.safe_dump(content))
            await reread(server, token, 403)
            await closed(socket)


async def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    token = add_token(file, "alice", ["play"])
    with Server(*ENVS, *INLINE, "--token-file", str(file)) as server:
        async with server.socket(**bearer(token)) as socket:
            for text in ("tokens: []", "[", ""):
                file.write_text(text)
                server.process.send_signal(signal.SIGHUP)
                assert await socket.call("ping") == {}
            file.unlink()
            server.process.send_signal(signal.SIGHUP)
            assert await socket.call("ping") == {}
            assert await status(server, token) == 200
        assert server.log().count("the tokens stay as they are") >= 1


async def test_what_a_revoked_token_registered_is_offered_no_more(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    author = add_token(file, "author", ["register"])
    player = add_token(file, "player", ["play"])
    arguments = ("--gateway", "--allow-network", "loopback", "--token-file", str(file))
    with ForeignServer("python") as upstream, Server(*arguments) as server:
        async with server.http(author) as registrant, server.http(player) as client:
            body = {"env_id": "Guess", "url": upstream.url, "protocol": "http", "ttl_s": 3600}
            assert (await registrant.post("/v1/envs", json=body)).status_code == 201
            assert (await client.get("/v1/envs/Guess")).status_code == 200
            revoke_tokens(file, "author")
            await reread(server, author, 401)
            assert (await client.get("/v1/envs/Guess")).json()["code"] == "unknown_env"


def test_the_token_command_changes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.yaml"

    def run(*arguments: str) -> str:
        assert main(["token", "--file", str(file), "--name", "me", *arguments]) == 0
        return capsys.readouterr().out.strip()

    first = run("--max-sessions", "5", "--rate-limit", "2.5")
    assert read_tokens(file)[0].quota == Quota(max_sessions=5, rate_limit=2.5)
    second = run("--rotate")
    assert file.stat().st_mode & 0o077 == 0
    tokens = Tokens.load(file)
    assert tokens.caller(first).name == tokens.caller(second).name == "me"
    assert tokens.caller(second).quota.max_sessions == 5
    assert run("--retire") == ""
    tokens.reload()
    with pytest.raises(Exception, match="not known"):
        tokens.caller(first)
    assert tokens.caller(second).name == "me"
    assert run("--revoke") == ""
    with pytest.raises(ConfigurationError, match="holds no tokens"):
        tokens.reload()
    assert tokens.caller(second).name == "me", "a file that cannot be used changes nothing"
    for arguments in (
        ("--rotate",),
        ("--retire", "--role", "play"),
        ("--max-sessions", "0"),
        ("--rate-limit", "-1"),
    ):
        with pytest.raises(SystemExit) as end:
            run(*arguments)
        assert end.value.code == 2
