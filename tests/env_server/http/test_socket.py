"""Frames, batches and what clients do wrong to a socket."""

import asyncio
import json
import socket as sockets
from typing import Any

import msgpack
import pytest
import websockets

from tests.support.wire import ENVS, MODULE, Server

AUTORESET_STEP = {"op": "step", "session_id": "MADE", "action": "a", "autoreset": True}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "nonsense",
        "[]",
        "3",
        "null",
        '{"op": "ping"}',
        '{"id": null, "op": "ping"}',
        '{"id": -1, "op": "ping"}',
        '{"id": 1.5, "op": "ping"}',
        '{"id": true, "op": "ping"}',
        '{"id": [1], "op": "ping"}',
        json.dumps({"id": 2**53, "op": "ping"}),
        json.dumps({"id": "x" * 129, "op": "ping"}),
        "[" * 5000,
        '{"id": 1, "id": {}, "op": "ping"}',
    ],
)
async def test_frames_without_an_envelope(server: Server, content: str) -> None:
    async with server.socket() as socket:
        await socket.connection.send(content)
        answer = await socket.receive()
        assert answer["id"] is None
        assert answer["error"]["code"] == "invalid_request"
        assert answer["error"]["errors"]
        assert await socket.call("ping") == {}


@pytest.mark.parametrize(
    "content", [b"", b"\xc1", b"\x93\x01", msgpack.packb([1]), msgpack.ExtType(1, b"a"), "text"]
)
async def test_msgpack_frames_without_an_envelope(server: Server, content: Any) -> None:
    data = msgpack.packb(content) if isinstance(content, msgpack.ExtType) else content
    async with server.socket(binary=True) as socket:
        await socket.connection.send(data)
        answer = await socket.receive()
        assert (answer["id"], answer["error"]["code"]) == (None, "invalid_request")
        assert await socket.call("ping") == {}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"op": "ping", "colour": 1}, "invalid_request"),
        ({"op": "step"}, "invalid_request"),
        ({"op": "step", "session_id": 5, "action": ""}, "invalid_request"),
        ({"op": "step", "session_id": [], "action": ""}, "invalid_request"),
        ({"op": "step", "session_id": "MADE"}, "invalid_request"),
        ({"op": "step", "session_id": "MADE", "action": "a", "step": "0"}, "invalid_request"),
        ({"op": "step", "session_id": "MADE", "action": "a", "step": True}, "invalid_request"),
        ({"op": "step", "session_id": "MADE", "action": "a", "autoreset": "perhaps"}, "invalid_request"),
        *(
            ({**AUTORESET_STEP, "reset": reset}, "invalid_request")
            for reset in ({"seed": -1}, {"seed": 2**53}, {"seed": True}, {"seed": 1, "sed": 1}, [1], "seed")
        ),
        ({"op": "step", "session_id": "MADE", "action": "a", "timeout_s": 0}, "invalid_request"),
        ({"op": "step", "session_id": "MADE", "action": "a", "colour": 1}, "invalid_request"),
        ({"op": "step", "session_id": "MADE", "action": 5}, "invalid_action"),
        ({"op": "step", "session_id": "MADE", "action": None}, "invalid_action"),
        ({"op": "reset", "session_id": "MADE", "seed": 1.5}, "invalid_request"),
        ({"op": "reset", "session_id": "MADE", "options": []}, "invalid_request"),
        ({"op": "reset", "session_id": "MADE", "options": {"a": {"__nd__": 3}}}, "invalid_request"),
        ({"op": "fork", "session_id": "MADE", "count": 0}, "invalid_request"),
        ({"op": "fork", "session_id": "MADE", "count": 9999}, "invalid_request"),
        ({"op": "restore"}, "invalid_request"),
        ({"op": "close"}, "invalid_request"),
        ({"op": "close", "session_ids": "abc"}, "invalid_request"),
        ({"op": "close", "session_id": "a", "session_ids": ["b"]}, "invalid_request"),
        ({"op": "verify", "items": []}, "invalid_request"),
        ({"op": "verify", "env_id": "Equal", "items": [{}]}, "invalid_request"),
        ({"op": "verify", "env_id": "Equal", "items": 3}, "invalid_request"),
        ({"op": "batch"}, "invalid_request"),
        ({"op": "batch", "ops": {}}, "invalid_request"),
        ({"op": "batch", "ops": [], "colour": 1}, "invalid_request"),
        ({"op": "batch", "ops": [{"op": "ping"}] * 1025}, "invalid_request"),
        ({"op": 5}, "unknown_op"),
        ({"op": []}, "unknown_op"),
        ({}, "unknown_op"),
    ],
)
async def test_fields_that_do_not_fit(server: Server, fields: dict[str, Any], code: str) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        frame = {"id": "mine", **{k: made if v == "MADE" else v for k, v in fields.items()}}
        await socket.connection.send(json.dumps(frame))
        answer = await socket.receive()
        assert (answer["id"], answer["error"]["code"]) == ("mine", code), answer
        assert (await socket.call("step", session_id=made, action="a"))["step"] == 1, "nothing happened"


async def test_an_id_in_use_is_refused(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make("SlowCount")
        await socket.connection.send(
            json.dumps({"id": 77, "op": "step", "session_id": made, "action": "sleep 0.3"})
        )
        await socket.connection.send(json.dumps({"id": 77, "op": "ping"}))
        assert (await socket.receive())["error"]["code"] == "invalid_request"
        assert (await socket.receive())["ok"]["step"] == 1
        await socket.connection.send(json.dumps({"id": 77, "op": "ping"}))
        assert (await socket.receive())["ok"] == {}


async def test_sessions_do_not_wait_for_each_other(server: Server) -> None:
    async with server.socket() as socket:
        slow, quick = await socket.make("SlowCount"), await socket.make("SlowCount")
        running = await socket.send("step", session_id=slow, action="sleep 0.5")
        following = await socket.send("step", session_id=quick, action="a")
        assert (await socket.receive())["id"] == following
        assert (await socket.receive())["id"] == running


async def test_a_frame_over_the_limit_leaves_the_socket_open(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        answer = await socket.ask("step", session_id=made, action="ä" * 2**19)
        assert answer["error"]["code"] == "too_large"
        assert (await socket.call("step", session_id=made, action="a"))["step"] == 1


async def test_a_frame_far_over_the_limit_costs_the_socket_and_nothing_else(server: Server) -> None:
    async with server.socket() as witness:
        made = await witness.make()
        async with server.socket() as socket:
            with pytest.raises(websockets.ConnectionClosed) as end:
                await socket.ask("step", session_id=made, action="x" * (18 * 2**20))
            assert end.value.rcvd is not None
            assert end.value.rcvd.code == 1009
        assert (await witness.call("step", session_id=made, action="a"))["step"] == 1


async def test_text_that_is_not_unicode_costs_the_socket_and_nothing_else(server: Server) -> None:
    async with server.socket() as witness:
        made = await witness.make()
        raw = await _handshake(server)
        raw.sendall(b"\x81\x82\0\0\0\0\xff\xff")
        assert _closes(raw)
        assert (await witness.call("step", session_id=made, action="a"))["step"] == 1


async def _handshake(server: Server) -> sockets.socket:
    raw = sockets.create_connection(("127.0.0.1", server.port), timeout=10)
    raw.sendall(
        b"GET /v1/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    assert b" 101 " in raw.recv(65536)
    return raw


def _closes(raw: sockets.socket) -> bool:
    while raw.recv(65536):
        pass
    raw.close()
    return True


async def open_sockets(server: Server) -> int:
    async with server.http() as client:
        text = (await client.get("/metrics")).text
        return int(
            float(next(line.split()[1] for line in text.splitlines() if line.startswith("rollgym_sockets ")))
        )


async def test_half_closed_sockets_do_not_leak(server: Server) -> None:
    before = await open_sockets(server)
    halves = [await _handshake(server) for _ in range(5)]
    assert await open_sockets(server) == before + 5
    for half in halves:
        half.shutdown(sockets.SHUT_WR)
    async with asyncio.timeout(10):
        while await open_sockets(server) != before:
            await asyncio.sleep(0.02)
    assert all(_closes(half) for half in halves)


async def test_a_socket_elsewhere_is_refused(server: Server) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with websockets.connect(f"ws://127.0.0.1:{server.port}/v1/sockets"):
            raise AssertionError("the handshake went through")
    assert refused.value.response.status_code == 404
    assert json.loads(refused.value.response.body)["code"] == "not_found"


async def test_without_a_subprotocol_json_is_spoken(server: Server) -> None:
    for offered in (None, [websockets.Subprotocol("other")]):
        async with websockets.connect(
            f"ws://127.0.0.1:{server.port}/v1/ws", subprotocols=offered
        ) as connection:
            assert connection.subprotocol is None
            await connection.send('{"id": 1, "op": "ping"}')
            assert json.loads(await connection.recv()) == {"id": 1, "ok": {}}


async def test_a_batch_answers_in_order_and_fails_in_parts(server: Server) -> None:
    async with server.socket() as socket:
        inline, slow, other = (
            await socket.make(),
            await socket.make("SlowCount"),
            await socket.make("SlowCount"),
        )
        results = await socket.batch(
            {"op": "step", "session_id": slow, "action": "sleep 0.2"},
            {"op": "step", "session_id": inline, "action": "a"},
            {"op": "step", "session_id": slow, "action": "b"},
            {"op": "step", "session_id": inline, "action": "raise"},
            {"op": "step", "session_id": other, "action": "c"},
            {"op": "batch", "ops": []},
            {"op": "nothing"},
            3,  # type: ignore[arg-type]
            {"op": ["step"]},
            {"op": "make", "env_id": "Nowhere"},
            {"op": "session", "session_id": slow},
            {"op": "close", "session_ids": [slow, other]},
        )
        assert [result.get("error", {}).get("code") for result in results] == [
            *(None, None, None, "env_error", None, "unknown_op", "unknown_op"),
            *("invalid_request", "invalid_request", "unknown_env", None, None),
        ]
        assert results[0]["ok"]["observation"] == "1 sleep 0.2"
        assert results[2]["ok"]["observation"] == "2 b", "one session twice runs in order"
        assert results[10]["ok"]["step"] == 2
        assert results[11]["ok"]["closed"] == 2


async def test_an_empty_batch(server: Server) -> None:
    async with server.socket() as socket:
        assert await socket.batch() == []


async def test_episodes_follow_each_other_in_one_frame(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make(kwargs={"length": 2})
        again = (await socket.call("make", env_id="Count", reset={"seed": 6}))["reset"]
        results = await socket.batch(
            *[{"op": "step", "session_id": made, "action": "a", "autoreset": True, "reset": {"seed": 6}}] * 5
        )
        steps = [(each["ok"]["episode"], each["ok"]["step"], "reset" in each["ok"]) for each in results]
        assert steps == [(0, 1, False), (0, 2, True), (1, 1, False), (1, 2, True), (2, 1, False)]
        assert results[1]["ok"]["reset"]["observation"] == again["observation"]
        assert results[1]["ok"]["reset"]["seed"] == 6
        problem = await socket.ask(
            "step", session_id=made, action="a", autoreset=True, reset={"options": {"expert": True}}
        )
        assert problem["error"]["code"] == "forbidden"


LONG = " " * 200_000


async def test_a_frame_behind_a_long_one_waits_for_room() -> None:
    with Server(*ENVS, "--workers", "3", "--max-in-flight", "2", "--max-queue-s", "10") as server:
        async with server.socket() as socket:
            sessions = [await socket.make("SlowCount") for _ in range(3)]
            actions = ("sleep 0.3", "sleep 0.3" + LONG, "c")
            numbers = [
                await socket.send("step", session_id=each, action=action)
                for each, action in zip(sessions, actions, strict=True)
            ]
            answers = [await socket.answer(number) for number in numbers]
            assert [answer.get("error") for answer in answers] == [None] * 3


async def test_what_an_environment_set_in_its_context_is_there_whichever_way_a_frame_takes() -> None:
    arguments = ("--env", f"Precise={MODULE}:Precise", "--isolation", "Precise=inline")
    with Server(*arguments) as server:
        async with server.socket() as socket:
            session = await socket.make("Precise")
            await socket.call("reset", session_id=session)
            actions = ["a"] * 300 + [LONG] + ["a"] * 300 + [LONG, "a"]
            numbers = [await socket.send("step", session_id=session, action=each) for each in actions]
            answers = [await socket.answer(number) for number in numbers]
            assert {answer["ok"]["observation"] for answer in answers} == {"50"}
            await socket.call("ping")
            assert (await socket.call("step", session_id=session, action="a"))["observation"] == "50"
