"""The log: one JSON object a line with what it is about, stacks for operators only, and never a token."""

import asyncio
import json
import socket as sockets
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollgym.env_server.access.tokens import add_token
from tests.support.wire import ENVS, INLINE, MODULE, Server

THREAD = ("--env", f"Thread={MODULE}:Count", "--isolation", "Thread=thread")


def records(text: str) -> list[dict[str, Any]]:
    """The log as JSON; every line of it is."""
    return [json.loads(line) for line in text.splitlines()]


async def test_stacks_are_in_the_log_with_their_session_and_not_in_the_answer() -> None:
    with Server(*ENVS, *INLINE, *THREAD, "--log-format", "json", "--log-level", "info") as server:
        made = {}
        async with server.socket() as socket, server.http() as client:
            for env_id in ("Count", "SlowCount", "Thread"):
                made[env_id] = await socket.make(env_id)
                answer = await socket.ask("step", session_id=made[env_id], action="raise")
                assert answer["error"]["code"] == "env_error"
                assert "Traceback" not in json.dumps(answer)
                assert "served_envs" not in json.dumps(answer)
            scored = await client.post("/v1/verify/Equal", json={"items": [{"response": "raise"}]})
            assert scored.json()["results"][0]["outcome"] == "error"
        server.stop()
        found = records(server.log())
    assert {"time", "level", "logger", "message", "process", "pid"} <= set.intersection(*map(set, found))
    raised = {each["env_id"]: each for each in found if "exception" in each}
    assert raised.keys() == {"Count", "SlowCount", "Thread", "Equal"}
    for env_id, session_id in made.items():
        assert raised[env_id]["session_id"] == session_id
        assert "Traceback" in raised[env_id]["exception"]
        assert "/home/someone/secret.txt" in raised[env_id]["exception"]
    assert raised["Count"]["process"] == "0"
    assert raised["SlowCount"]["process"] == f"worker-{raised['SlowCount']['pid']}"


async def test_the_server_below_writes_in_the_same_format() -> None:
    with Server(*ENVS, *INLINE, "--log-format", "json", "--log-level", "warning") as server:
        with sockets.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(b"this is no HTTP\r\n\r\n")
            assert b"400" in connection.recv(1000)
        server.stop()
        found = records(server.log())
    assert ("uvicorn.error", "warning") in {(each["logger"], each["level"]) for each in found}


async def test_every_process_says_which_it_is() -> None:
    arguments = ("--processes", "2", "--log-format", "json", "--log-level", "debug")
    with Server(*ENVS, *INLINE, *arguments) as server:
        owners: dict[str, str] = {}
        while len(owners) < 2:
            async with server.socket() as socket:
                made = await socket.make()
                owners[made.partition(".")[0]] = made
        server.stop()
        found = records(server.log())
    for process, session_id in owners.items():
        assert {each["process"] for each in found if each.get("session_id") == session_id} == {process}


async def test_problems_have_their_request_at_debug_level() -> None:
    with Server(*ENVS, *INLINE, "--log-format", "json", "--log-level", "debug") as server:
        async with server.socket() as socket:
            await socket.ask("make", env_id="Nothing", request_id="r-1")
            await socket.ask("make", env_id={"no": "text"}, request_id="r" * 1000)
        server.stop()
        found = records(server.log())
    (one,) = [each for each in found if each.get("request_id") == "r-1"]
    assert (one["message"], one["env_id"]) == ("make is answered unknown_env", "Nothing")
    assert max(len(each.get("request_id", "")) for each in found) == 128


async def test_text_says_what_it_is_about() -> None:
    with Server(*ENVS, *INLINE, "--log-level", "warning") as server:
        async with server.socket() as socket:
            made = await socket.make()
            await socket.ask("step", session_id=made, action="raise")
        server.stop()
        log = server.log()
    assert f"session_id={made} env_id=Count" in log
    assert "Traceback" in log


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_token_is_ever_in_the_log(tmp_path: Path, form: str) -> None:
    tokens = {
        name: add_token(tmp_path / f"{file}.yaml", name, [role])  # type: ignore[list-item]
        for file, name, role in (
            ("gateway", "player", "play"),
            ("gateway", "node", "register"),
            ("node", "gateway", "play"),
        )
    }
    (tmp_path / "register").write_text(tokens["node"])
    (tmp_path / "play").write_text(tokens["gateway"])
    loud = ("--log-level", "debug", "--log-format", form)
    gateway_arguments = (
        "--gateway",
        "--allow-network",
        "loopback",
        "--token-file",
        str(tmp_path / "gateway.yaml"),
    )
    with Server(*gateway_arguments, *loud) as gateway:
        node_arguments = (
            *("--register", gateway.url, "--register-token-file", str(tmp_path / "register")),
            *("--token-file", str(tmp_path / "node.yaml"), "--node-token-file", str(tmp_path / "play")),
        )
        with Server(*ENVS, *INLINE, *node_arguments, *loud) as node:
            await use(gateway, tokens["player"])
            wrong = "roll_wrong-" + "x" * 32
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                for headers in ({"Authorization": f"Bearer {wrong}"}, {"Authorization": wrong}):
                    answer = await client.get("/v1/envs", headers=headers)
                    assert answer.status_code == 401
                    assert wrong not in answer.text
                await client.get("/v1/envs", params={"token": wrong})
            async with gateway.socket() as socket:
                assert (await socket.ask("auth", token=wrong))["error"]["code"] == "unauthorized"
            node.stop()
            gateway.stop()
            log = gateway.log() + node.log()
    assert "the session is open" in log, "at this level there is something to see"
    for token in (*tokens.values(), wrong):
        assert token not in log


async def use(gateway: Server, token: str) -> None:
    """Play through a gateway once a node has registered."""
    async with gateway.http(token) as client, asyncio.timeout(60):
        while not (await client.get("/v1/envs/Count")).is_success:
            await asyncio.sleep(0.1)
    async with gateway.socket() as socket:
        assert await socket.call("auth", token=token) == {}
        made = await socket.make()
        await socket.call("step", session_id=made, action="a")


@pytest.mark.parametrize(("form", "isolation"), [("text", "inline"), ("json", "process")])
async def test_what_a_client_sends_does_not_fill_the_log(form: str, isolation: str) -> None:
    """An exception that holds what was sent would write a megabyte for each call."""
    lake = ("--env", "Lake=rollgym.envs.games.frozen_lake:FrozenLakeEnv", "--isolation", f"Lake={isolation}")
    with Server("--no-builtin", *lake, "--log-level", "warning", "--log-format", form) as server:
        async with server.socket() as socket:
            for long in ("x" * 500_000, "\n" * 200_000):
                answer = await socket.ask("make", env_id="Lake", reset={"options": {"split": long}})
                assert answer["error"]["code"] == "invalid_request"
        server.stop()
        written = server.log()
    assert "Traceback" in written
    assert len(written) < 300_000
