"""A server that has more to do than it can: everybody gets an answer, and who is refused has lost nothing."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rollgym.clients.client.client import EnvClient
from tests.support.client_server import ServerProcess
from tests.support.wire import ENVS, INLINE, Server, Socket

_SESSIONS = 60
_LONG_STEP = "sleep 0.05"


async def _made(socket: Socket, env_id: str, count: int) -> list[str]:
    made = await socket.call("make", env_id=env_id, count=count, kwargs={"length": 100}, reset={"seed": 1})
    return [each["session_id"] for each in made["sessions"]]


def _codes(answers: Sequence[dict[str, Any]]) -> list[str]:
    return [answer["error"]["code"] if "error" in answer else "ok" for answer in answers]


async def _places(socket: Socket, sessions: Sequence[str]) -> list[int]:
    """At which step the sessions are."""
    answers = await socket.batch(*({"op": "session", "session_id": each} for each in sessions))
    return [answer["ok"]["step"] for answer in answers]


async def _until_taken(socket: Socket, sessions: Sequence[str]) -> None:
    """Take the first step of each, however often it is refused."""
    left = list(sessions)
    while left:
        step = {"op": "step", "action": "a", "episode": 0, "step": 0}
        answers = await socket.batch(*({**step, "session_id": each} for each in left))
        codes = _codes(answers)
        assert set(codes) <= {"ok", "overloaded"}
        left = [each for each, code in zip(left, codes, strict=True) if code != "ok"]
    assert await _places(socket, sessions) == [1] * len(sessions)


async def test_of_frames_that_come_faster_than_they_are_done_each_is_answered() -> None:
    with Server(*ENVS, *INLINE, "--max-queue-s", "0.4", "--log-level", "warning") as server:
        async with server.socket() as socket, server.http() as client:
            sessions = await _made(socket, "Count", _SESSIONS + 1)
            closed = sessions.pop()
            numbers = [
                await socket.send("step", session_id=each, action=_LONG_STEP, episode=0, step=0)
                for each in sessions
            ]
            others = [await socket.send("ping"), await socket.send("close", session_ids=[closed])]
            answers = [await socket.answer(number) for number in numbers]
            assert [await socket.answer(number) for number in others] == [
                {"id": others[0], "ok": {}},
                {"id": others[1], "ok": {"closed": 1}},
            ], "what makes the queue shorter, or belongs to no queue, is done"
            codes = _codes(answers)
            assert set(codes) == {"ok", "overloaded"}
            refused = [each for each, code in zip(sessions, codes, strict=True) if code != "ok"]
            assert all(answer["error"]["retry_after"] >= 1 for answer in answers if "error" in answer)
            assert await _places(socket, refused) == [0] * len(refused)
            await _until_taken(socket, refused)
            metrics = (await client.get("/metrics")).text
            assert f'rollgym_refusals_total{{reason="overloaded"}} {float(len(refused))}' in metrics
        server.wait_for("this process is behind")


async def test_a_batch_is_refused_operation_by_operation() -> None:
    with Server(*ENVS, *INLINE, "--max-queue-s", "0.4") as server:
        async with server.socket() as socket:
            *sessions, stepped, closed = await _made(socket, "Count", _SESSIONS + 2)
            numbers = [await socket.send("step", session_id=each, action=_LONG_STEP) for each in sessions]
            results = await socket.batch(
                {"op": "step", "session_id": stepped, "action": "a"},
                {"op": "close", "session_ids": [closed]},
            )
            assert _codes(results) == ["overloaded", "ok"]
            assert {"ok", "overloaded"} == set(_codes([await socket.answer(each) for each in numbers]))


async def test_requests_that_come_faster_than_they_are_done_are_refused_over_http() -> None:
    with Server(*ENVS, *INLINE, "--max-queue-s", "0.4") as server:
        async with server.http() as client:
            asked = {"env_id": "Count", "count": _SESSIONS, "kwargs": {"length": 100}, "reset": {"seed": 1}}
            made = (await client.post("/v1/sessions", json=asked)).json()["sessions"]
            spare = made.pop()["session_id"]
            paths = [f"/v1/sessions/{each['session_id']}" for each in made]
            links = [await asyncio.open_connection("127.0.0.1", server.port) for _ in paths]
            body = json.dumps({"action": _LONG_STEP, "episode": 0, "step": 0})
            for path, (_, writer) in zip(paths, links, strict=True):
                head = f"POST {path}/step HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            untouched = asyncio.gather(
                client.get("/health"), client.get("/metrics"), client.delete(f"/v1/sessions/{spare}")
            )
            assert [each.status_code for each in await untouched] == [200, 200, 204]
            answers = [await _answer(reader) for reader, _ in links]
            refused = [answer for answer in answers if answer[0] != 200]
            assert refused
            for status, head, problem in refused:
                assert (status, problem["code"]) == (503, "overloaded")
                assert head["retry-after"] == str(problem["retry_after"])
                assert problem["retry_after"] >= 1
            for _, writer in links:
                writer.close()
            async with server.socket() as socket:
                places = await _places(socket, [each["session_id"] for each in made])
            assert places == [int(status == 200) for status, *_ in answers]


async def _answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Status, headers and body of an HTTP response."""
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    head = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = json.loads(await reader.readexactly(int(head["content-length"])))
    return int(status.split()[1]), head, body


async def test_a_socket_with_all_the_frames_that_it_may_have_is_read_on() -> None:
    """Until frames that are slow have their answers, others wait for a while and are refused then."""
    arguments = ("--max-in-flight", "4", "--max-queue-s", "0.2", "--workers", "1")
    with Server(*ENVS, *INLINE, *arguments) as server:
        async with server.socket() as socket:
            sessions = await _made(socket, "SlowCount", 12)
            numbers = [
                await socket.send("step", session_id=each, action="sleep 1", episode=0, step=0)
                for each in sessions
            ]
            ping = await socket.send("ping")
            answers = [await socket.answer(number) for number in numbers]
            codes = _codes(answers)
            assert codes[:4] == ["ok"] * 4
            assert set(codes) == {"ok", "overloaded"}
            assert "ok" in await socket.answer(ping)
            refused = [each for each, code in zip(sessions, codes, strict=True) if code != "ok"]
            await _until_taken(socket, refused)


async def test_a_client_comes_again_and_says_how_long_it_has_waited() -> None:
    arguments = ("--max-in-flight", "2", "--max-queue-s", "0.2", "--workers", "1", "--log-level", "error")
    with ServerProcess((*ENVS, *arguments)) as server:
        async with EnvClient(server.url) as client:
            assert client.backpressure == (0, 0.0)
            sessions = await client.make_many("SlowCount", 6)
            await client.reset_many([(session, 1) for session in sessions])
            results = await asyncio.gather(*(session.step("sleep 0.4") for session in sessions))
            assert [result.info["count"] for result in results] == [1] * 6
            assert client.backpressure.overloaded >= 1
            assert client.backpressure.waited_s >= client.backpressure.overloaded


async def test_a_gateway_passes_on_that_a_node_is_overloaded_and_keeps_it() -> None:
    node_arguments = ("--max-in-flight", "2", "--max-queue-s", "0.2", "--workers", "1", "--no-builtin")
    with Server("--gateway", "--allow-network", "loopback") as gateway:
        node = (*ENVS, *node_arguments, "--register", gateway.url, "--log-level", "error")
        with ServerProcess(node):
            async with gateway.socket() as socket, gateway.http() as client:
                async with asyncio.timeout(60):
                    while (await client.get("/v1/envs/SlowCount")).status_code != 200:
                        await asyncio.sleep(0.1)
                sessions = await _made(socket, "SlowCount", 8)
                numbers = [
                    await socket.send("step", session_id=each, action="sleep 0.5", episode=0, step=0)
                    for each in sessions
                ]
                codes = _codes([await socket.answer(number) for number in numbers])
                assert set(codes) == {"ok", "overloaded"}
                refused = [each for each, code in zip(sessions, codes, strict=True) if code != "ok"]
                await _until_taken(socket, refused)
                metrics = (await client.get("/metrics")).text
                assert 'rollgym_healthy_replicas{env_id="SlowCount"} 1.0' in metrics
                assert "rollgym_upstream_errors_total{" not in metrics
