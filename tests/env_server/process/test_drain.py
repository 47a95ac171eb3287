"""SIGTERM: what runs is finished, what is new is refused, sockets are closed, the exit code is 0."""

import asyncio
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import websockets

from tests.support.foreign_servers import Said, plain, scripted
from tests.support.wire import ENVS, INLINE, Server


async def test_a_drain_finishes_what_runs_and_refuses_what_is_new() -> None:
    with Server(*ENVS, *INLINE) as server:
        async with server.http() as client, server.socket() as socket:
            assert (await client.get("/ready")).status_code == 200
            made = await socket.make("SlowCount")
            inline = await socket.make()
            running = await socket.send("step", session_id=made, action="sleep 1.5")
            over_http = asyncio.create_task(
                client.post("/v1/verify/Equal", json={"items": [{"response": "sleep 1", "answer": "1"}]})
            )
            await asyncio.sleep(0.2)
            server.process.terminate()
            async with asyncio.timeout(5):
                while (await client.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.02)
            assert (await client.get("/health")).status_code == 200
            for op, fields in (
                ("make", {"env_id": "Count"}),
                ("fork", {"session_id": inline}),
                ("restore", {"episode": await socket.call("episode", session_id=inline)}),
            ):
                problem = (await socket.ask(op, **fields))["error"]
                assert (problem["code"], problem["retry_after"] > 0) == ("draining", True)
            refused = await client.post("/v1/sessions", json={"env_id": "Count"})
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) > 0
            assert (await socket.call("step", session_id=inline, action="a"))["step"] == 1, "sessions go on"
            assert (await socket.answer(running))["ok"]["step"] == 1
            assert (await over_http).json()["results"][0]["outcome"] == "wrong"
            with pytest.raises(websockets.ConnectionClosed) as end:
                await socket.connection.recv()
            assert end.value.rcvd is not None
            assert end.value.rcvd.code in (1001, 1012)
        assert server.process.wait(20) == 0


async def test_when_the_grace_ends_those_who_wait_are_told_at_once() -> None:
    with Server(*ENVS, *INLINE, "--drain-grace-s", "0.3") as server:
        async with server.http() as client, server.socket() as socket:
            over_http = await socket.make("SlowCount")
            over_socket = await socket.make("SlowCount")
            step = {"action": "sleep 60", "step": 0}
            posted = asyncio.create_task(client.post(f"/v1/sessions/{over_http}/step", json=step))
            sent = await socket.send("step", session_id=over_socket, **step)
            await asyncio.sleep(0.2)
            server.process.terminate()
            assert (await socket.answer(sent))["error"]["code"] == "draining"
            refused = await posted
            assert (refused.status_code, refused.json()["code"]) == (503, "draining")
            with pytest.raises(websockets.ConnectionClosed):
                await socket.connection.recv()
        assert await asyncio.to_thread(server.process.wait, 20) == 0
        # uvicorn says that of what it gives up by itself, five seconds later.
        assert "timeout graceful shutdown exceeded" not in server.log()


async def test_a_call_over_http_has_the_whole_grace() -> None:
    with Server(*ENVS, *INLINE) as server:
        async with server.http() as client:
            items = [{"response": "sleep 6", "answer": "1"}]
            scored = asyncio.create_task(client.post("/v1/verify/Equal", json={"items": items}))
            await asyncio.sleep(0.3)
            server.process.terminate()
            assert (await scored).json()["results"][0]["outcome"] == "wrong"
        assert await asyncio.to_thread(server.process.wait, 20) == 0


async def test_a_second_signal_ends_a_server_whose_loop_stands_still() -> None:
    with Server(*ENVS, *INLINE) as server:
        async with server.socket() as socket:
            made = await socket.make("Count")
            await socket.send("step", session_id=made, action="sleep 100")
            await asyncio.sleep(0.3)
            server.process.terminate()
            # The loop is given a second to hear of the first one.
            await asyncio.sleep(1.2)
            server.process.terminate()
            assert await asyncio.to_thread(server.process.wait, 5) == 128 + signal.SIGTERM
        assert "held up the event loop" in server.log()


async def test_an_idle_server_ends_at_once() -> None:
    with Server(*ENVS, *INLINE, "--drain-grace-s", "60") as server:
        async with server.socket() as socket:
            await socket.make()
            server.process.terminate()
            assert await asyncio.to_thread(server.process.wait, 20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
async def test_the_end_of_input_ends_it_where_that_is_asked_for(processes: str) -> None:
    with Server("--stop-at-end-of-input", "--processes", processes) as server:
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert await asyncio.to_thread(server.process.wait, 20) == 0


async def test_a_server_that_waits_for_the_end_of_input_ends_before_it() -> None:
    with Server("--stop-at-end-of-input") as server:
        assert server.stop() == 0


@pytest.mark.slow
async def test_who_waits_for_another_server_is_told_too() -> None:
    grace = ("--drain-grace-s", "0.5")
    with (
        Server("--gateway", "--allow-network", "loopback", *grace) as gateway,
        Server(*ENVS, *INLINE, "--register", gateway.url, *grace) as node,
    ):
        async with gateway.http() as client, gateway.socket() as socket:
            async with asyncio.timeout(60):
                while (await client.get("/v1/envs/SlowCount")).status_code != 200:
                    await asyncio.sleep(0.05)
            step = {"op": "step", "action": "sleep 60", "step": 0}
            first, second, third = [await socket.make("SlowCount") for _ in range(3)]
            single = await socket.send(**step, session_id=first)
            batch = await socket.send("batch", ops=[{**step, "session_id": second}])
            del step["op"]
            posted = asyncio.create_task(client.post(f"/v1/sessions/{third}/step", json=step))
            await asyncio.sleep(0.3)
            gateway.process.terminate()
            assert (await socket.answer(single))["error"]["code"] == "draining"
            [of_batch] = (await socket.answer(batch))["results"]
            assert of_batch["error"]["code"] == "draining", "each step of a batch has an answer of its own"
            assert (await posted).json()["code"] == "draining"
            with pytest.raises(websockets.ConnectionClosed):
                await socket.connection.recv()
        assert await asyncio.to_thread(gateway.process.wait, 20) == 0
        assert node.process.poll() is None


async def test_every_message_of_openenv_is_answered_when_the_grace_ends() -> None:
    with Server(*ENVS, "--drain-grace-s", "0.3") as server:
        url = f"ws://127.0.0.1:{server.port}/openenv/SlowCount/ws"
        async with websockets.connect(url) as connection:
            await connection.send('{"type": "reset", "data": {"seed": 1}}')
            assert json.loads(await connection.recv())["type"] == "observation"
            await connection.send('{"type": "step", "data": {"action": "sleep 60"}}')
            await connection.send('{"type": "state"}')
            await asyncio.sleep(0.3)
            server.process.terminate()
            for _ in range(2):
                answer = json.loads(await connection.recv())
                assert answer["data"]["problem"]["code"] == "draining"
            with pytest.raises(websockets.ConnectionClosed):
                await connection.recv()
        assert await asyncio.to_thread(server.process.wait, 20) == 0


async def test_a_gateway_that_gives_ids_of_no_use_keeps_no_server_from_its_end() -> None:
    def answer(path: str, body: dict[str, Any]) -> Said:
        told = {"env_id": "Count", "registration_id": "not\nan id", "expires_at": 1e12}
        return plain({"registrations": [told]})

    async with scripted(answer) as gateway:
        with Server(
            "--no-builtin", "--env", ENVS[1], "--register", gateway, "--log-level", "warning"
        ) as server:
            await asyncio.to_thread(server.wait_for, "registered 1 environments")
            server.process.terminate()
            assert await asyncio.to_thread(server.process.wait, 20) == 0


async def test_who_waits_for_sessions_is_told_before_those_that_there_are_have_ended() -> None:
    env = ("--env", "SlowToClose=tests.support.served_envs:SlowToClose", "--isolation", "SlowToClose=thread")
    with Server(*env, "--drain-grace-s", "0.3") as server:
        async with server.socket() as socket:
            kwargs = {"makes": [0, 60], "closes": 4}
            made = await socket.send("make", env_id="SlowToClose", kwargs=kwargs, count=2)
            await asyncio.sleep(0.5)
            server.process.terminate()
            assert (await socket.answer(made))["error"]["code"] == "draining"
        assert await asyncio.to_thread(server.process.wait, 20) == 0


async def test_what_is_asked_of_a_program_is_answered_within_the_grace() -> None:
    with Server("--no-builtin", "--env", ENVS[1], "--sandbox", "auto") as server:
        url = f"ws://127.0.0.1:{server.port}/v1/sandbox/session"
        async with websockets.connect(url) as connection:
            await connection.send(
                '{"language": "bash", "code": "sleep 1.5; echo late; sleep 50", "run_timeout": 55}'
            )
            assert json.loads(await connection.recv()) == {"ok": {}}
            await connection.send('{"op": "read", "timeout_s": 5}')
            await asyncio.sleep(0.3)
            server.process.terminate()
            assert await connection.recv() == b"late\n"
            with pytest.raises(websockets.ConnectionClosed):
                await connection.recv()
        assert await asyncio.to_thread(server.process.wait, 30) == 0


def test_a_server_whose_state_directory_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with Server(*ENVS, *INLINE, "--state-dir", str(state)) as server:
        shutil.rmtree(state)
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert "cannot be cut to its records" in server.log()
