"""EnvClient against a real server."""

import asyncio
import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import httpx
import numpy as np
import pytest

from rollgym import RemoteEnv, RemoteVectorEnv
from rollgym.clients.client.client import EnvClient
from rollgym.clients.net.caller import ServerCalls
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_envs import Walk
from tests.support.client_server import ENVS, ServerProcess
from tests.support.processes import env_server

ENCODINGS = ["json", "msgpack"]


def play_locally(seed: int, actions: list[str]) -> list[Any]:
    env = Walk(risk=0.0)
    results: list[Any] = [env.reset(seed=seed)]
    return results + [env.step(action) for action in actions]


async def play(session: Any, seed: int, actions: list[str]) -> list[Any]:
    results: list[Any] = [await session.reset(seed)]
    return results + [await session.step(action) for action in actions]


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_remote_episode_is_the_local_one(server: ServerProcess, encoding: Any) -> None:
    actions = ["left", "", "漢字 √", "x" * 3000]
    async with EnvClient(server.url, encoding=encoding) as client:
        session = await client.make("Walk-v0", {"risk": 0.0})
        assert await play(session, 5, actions) == play_locally(5, actions)
        assert (session.episode, session.step_index, session.seed) == (0, 4, 5)
        await session.reset(2**53 - 1)
        assert (session.episode, session.step_index, session.seed) == (1, 0, 2**53 - 1)


async def test_whoever_stops_waiting_for_sessions_leaves_none_behind(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Slow-v0")
        await session.reset(0)
        episode = await session.episode_record()
        asked = [
            *(asyncio.ensure_future(client.make_many("Slow-v0", 3)) for _ in range(4)),
            *(asyncio.ensure_future(client.restore(episode)) for _ in range(4)),
            asyncio.ensure_future(session.fork(3)),
        ]
        await asyncio.sleep(0.001)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        assert all(task.cancelled() for task in asked)
        async with asyncio.timeout(20):
            while await open_sessions(server) != {session.session_id}:
                await asyncio.sleep(0.05)
            # What was asked for last may come in last.
            await asyncio.sleep(0.5)
        assert await open_sessions(server) == {session.session_id}


@pytest.mark.parametrize(
    ("opens", "fails"),
    [("make", "make"), ("restore", "restore"), ("restore", "episode"), ("fork", "fork"), ("fork", "episode")],
)
@pytest.mark.parametrize("error", [TimeoutError("late"), ConnectionError("away")], ids=repr)
async def test_whoever_is_told_of_an_error_leaves_no_session_behind(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, opens: str, fails: str, error: Exception
) -> None:
    await leaves_no_session_behind(server, monkeypatch, opens, fails, error)


@pytest.mark.parametrize("opens", ["restore", "fork"])
async def test_a_session_whose_episode_is_refused_is_not_left_behind(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, opens: str
) -> None:
    await leaves_no_session_behind(server, monkeypatch, opens, "episode", ProblemError("internal", "no"))


async def leaves_no_session_behind(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, opens: str, fails: str, error: Exception
) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Slow-v0")
        await session.reset(0)
        episode = await session.episode_record()
        before = await open_sessions(server)
        fail_once(monkeypatch, fails, error)
        ways: dict[str, Callable[[], Awaitable[Any]]] = {
            "make": lambda: client.make_many("Slow-v0", 2),
            "restore": lambda: client.restore(episode),
            "fork": lambda: session.fork(2),
        }
        with pytest.raises(type(error)):
            await ways[opens]()
        async with asyncio.timeout(20):
            while await open_sessions(server) != before:
                await asyncio.sleep(0.05)


def fail_once(monkeypatch: pytest.MonkeyPatch, op: str, error: Exception) -> None:
    """Have the answer to one call of an operation be lost, with what the caller makes of that."""
    really, failed = ServerCalls.call, False

    async def call(caller: ServerCalls, fields: dict[str, Any], process: int | None, deadline: float) -> Any:
        nonlocal failed
        reply = await really(caller, fields, process, deadline)
        if fields["op"] == op and not failed:
            failed = True
            raise error
        return reply

    monkeypatch.setattr(ServerCalls, "call", call)


async def test_a_client_that_ends_before_it_has_taken_back_what_it_asked_for_ends_quietly(
    server: ServerProcess,
) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        async with EnvClient(server.url) as client:
            client.opener.take_back({"op": "make", "env_id": "Slow-v0", "request_id": "never-sent"}, 0)
        gc.collect()
    assert not [str(each.message) for each in told if "never awaited" in str(each.message)]


async def open_sessions(server: ServerProcess) -> set[str]:
    async with httpx.AsyncClient() as http:
        listed = (await http.get(f"{server.url}/v1/sessions?env_id=Slow-v0")).json()
    return {each["session_id"] for each in listed["sessions"]}


async def test_the_catalog_and_the_server_describe_themselves(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        assert {"Walk-v0", "CartPole-v1"} <= {env.env_id for env in await client.envs()}
        walk = await client.env("Walk-v0")
        assert (walk.version, walk.deterministic, walk.isolation) == ("3", True, "inline")
        assert (await client.info()).protocol == 1
        with pytest.raises(ProblemError, match="unknown_env"):
            await client.make("Wolk-v0")


async def test_without_a_seed_the_server_draws_one_and_tells(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Walk-v0")
        first = await session.reset()
        assert session.seed is not None
        assert await session.reset(session.seed) == first


async def test_a_slow_session_does_not_hold_the_others(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        slow, fast = await client.make("Slow-v0"), await client.make("Walk-v0", {"risk": 0.0})
        await asyncio.gather(slow.reset(0), fast.reset(0))
        waiting = asyncio.create_task(slow.step("sleep 1"))
        for _ in range(20):
            await fast.step("left")
        assert not waiting.done()
        await waiting


async def test_one_bad_operation_in_a_batch_fails_alone(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        sessions = await client.make_many("Walk-v0", 5, {"risk": 0.0})
        begun = await client.reset_many([(session, seed) for seed, session in enumerate(sessions[:4])])
        assert begun == [play_locally(seed, [])[0] for seed in range(4)]
        stepped = await client.step_many(
            [(session, "left") for session in sessions[:2]]
            + [
                (sessions[2], "raise"),
                (sessions[3], "right"),
                (sessions[4], "left"),
            ]
        )
        assert stepped[0] == play_locally(0, ["left"])[-1]
        assert stepped[3] == play_locally(3, ["right"])[-1]
        assert [result.code for result in (stepped[2], stepped[4])] == ["env_error", "not_reset"]
        assert stepped[2].extra["error_class"] == "RuntimeError"


async def test_a_batch_too_large_for_one_frame_goes_in_several(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        sessions = await client.make_many("Walk-v0", 9, {"risk": 0.0})
        await client.reset_many([(session, 0) for session in sessions])
        action = "y" * 200_000
        results = await client.step_many([(session, action) for session in sessions])
        assert results == [play_locally(0, [action])[-1]] * 9
        with pytest.raises(ProblemError, match="too_large"):
            await sessions[0].step("y" * 2_000_000)
        assert await sessions[0].step("z") == play_locally(0, [action, "z"])[-1]


@pytest.fixture(scope="module")
def terse() -> Iterator[str]:
    """A server whose replies have 100,000 bytes at most."""
    with env_server(*ENVS, "--max-reply-bytes", "100000") as url:
        yield url


@pytest.mark.parametrize("together", [False, True])
async def test_an_episode_whose_reply_was_too_large_breaks_off_until_it_is_reset(
    terse: str, together: bool
) -> None:
    async with EnvClient(terse) as client:
        session = await client.make("Walk-v0", {"risk": 0.0})

        async def step(action: str) -> Any:
            if not together:
                return await session.step(action)
            (result,) = await client.step_many([(session, action)])
            if isinstance(result, ProblemError):
                raise result
            return result

        await session.reset(0)
        await step("left")
        for action in ("y" * 200_000, "y" * 200_000):
            with pytest.raises(ProblemError, match="the reply has 200") as refused:
                await step(action)
            assert (refused.value.code, refused.value.extra["part"]) == ("too_large", "reply")
        for _ in range(2):
            with pytest.raises(
                ProblemError, match=r"the episode broke off: .* step 1 .* reset the session"
            ) as broken:
                await step("right")
            assert broken.value.code == "not_reset"
        await session.reset(0)
        assert await step("right") == play_locally(0, ["right"])[-1]


def test_a_remote_environment_whose_reply_was_too_large_asks_for_a_reset(terse: str) -> None:
    env = RemoteEnv(terse, "Walk-v0", {"risk": 0.0})
    env.reset(seed=0)
    with pytest.raises(ProblemError, match="too_large"):
        env.step("y" * 200_000)
    with pytest.raises(ProblemError, match="not_reset: the episode broke off"):
        env.step("right")
    env.reset(seed=0)
    assert env.step("right")[0] == play_locally(0, ["right"])[-1][0]
    env.close()


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_autoreset_gives_the_end_and_the_new_begin(server: ServerProcess, encoding: Any) -> None:
    async with EnvClient(server.url, encoding=encoding) as client:
        session = await client.make("Walk-v0", {"risk": 1.0})
        await session.reset(4)
        result = await session.step("left", autoreset=True)
        env = Walk(risk=1.0)
        env.reset(seed=4)
        observation, reward, terminated, _, info = env.step("left")
        assert (result.reward, result.terminated) == (reward, terminated)
        assert (result.info["final_obs"], result.info["final_info"]) == (observation, info)
        begun, begun_info = env.reset(seed=session.seed)
        assert result.observation == begun
        assert result.info["state"] == begun_info["state"]
        assert (session.episode, session.step_index) == (1, 0)


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_portable_episode_goes_on_elsewhere(server: ServerProcess, encoding: Any) -> None:
    async with EnvClient(server.url, encoding=encoding) as client:
        for env_id, action in (("Walk-v0", "left"), ("Arm-v0", [0.5, -0.25])):
            session = await client.make(env_id)
            await session.reset(1)
            for _ in range(3):
                if (await session.step(action))[2:4] != (False, False):
                    await session.reset(2)
            restored = await client.restore(await session.episode_record())
            assert (restored.episode, restored.step_index, restored.seed) == (
                session.episode,
                session.step_index,
                session.seed,
            )
            assert (await restored.episode_record()).digests == (await session.episode_record()).digests


async def test_forks_go_their_own_ways_from_the_same_point(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Walk-v0", {"risk": 0.0})
        await play(session, 7, ["a", "b"])
        first, second = await session.fork(2)
        expected = play_locally(7, ["a", "b", "c"])[-1]
        assert await first.step("c") == expected
        await second.step("other")
        assert await session.step("c") == expected
        assert await first.step("d") == await session.step("d")


async def test_a_full_server_is_waited_for() -> None:
    with ServerProcess([*ENVS, "--max-sessions", "1"]) as server:
        async with EnvClient(server.url) as client, EnvClient(server.url, timeout_s=1.0) as impatient:
            session = await client.make("Walk-v0")
            with pytest.raises(ProblemError, match="at_capacity"):
                await impatient.make("Walk-v0")
            waiting = asyncio.create_task(client.make("Walk-v0"))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await session.close()
            assert (await waiting).session_id != session.session_id


async def test_closing_the_client_closes_its_sessions(server: ServerProcess) -> None:
    async with EnvClient(server.url) as watcher:
        before = (await watcher.info()).capacity.sessions
        async with EnvClient(server.url) as client:
            sessions = await client.make_many("Walk-v0", 40)
            assert (await watcher.info()).capacity.sessions == before + 40
            assert await client.close_sessions(sessions[:10]) == 10
            await sessions[0].close()
        assert (await watcher.info()).capacity.sessions == before


async def test_an_operation_of_a_closed_session_is_refused(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Walk-v0")
        await session.reset(0)
        await session.close()
        with pytest.raises(ProblemError) as refused:
            await session.step("left")
        assert refused.value.code in ("session_gone", "unknown_session")


async def test_cancel_gives_up_a_running_step(server: ServerProcess) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Slow-v0", {"risk": 0.0})
        await session.reset(0)
        running = asyncio.create_task(session.step("sleep 30"))
        await asyncio.sleep(0.3)
        await session.cancel()
        with pytest.raises(ProblemError, match="step_timeout"):
            await running
        assert await play(session, 1, ["left"]) == play_locally(1, ["left"])


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[ServerProcess, str]]:
    """A server with one token, and the token."""
    file = tmp_path / "tokens.yaml"
    made = subprocess.run(
        [sys.executable, "-m", "rollgym.env_server", "token", "--file", str(file), "--name", "me"],
        capture_output=True,
        text=True,
        check=True,
    )
    with ServerProcess([*ENVS, "--token-file", str(file)]) as server:
        yield server, made.stdout.split()[-1]


async def test_a_seed_beyond_what_the_wire_carries_is_refused_before_it_is_sent(
    server: ServerProcess,
) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Walk-v0")
        for seed in (2**53, -1, 2**5000):
            with pytest.raises(ValueError, match=r"not from 0 to 2\*\*53 - 1"):
                await session.reset(seed)
        with pytest.raises(TypeError, match="not a boolean"):
            await session.reset(True)
        await session.reset(np.int64(2**53 - 1))
        assert session.seed == 2**53 - 1


async def test_tokens_open_the_door(guarded: tuple[ServerProcess, str]) -> None:
    server, token = guarded
    async with EnvClient(server.url, token=token) as client:
        await (await client.make("Walk-v0")).reset(0)
    for wrong in (None, "wrong"):
        with pytest.raises(ProblemError, match="unauthorized"):
            async with EnvClient(server.url, token=wrong) as client:
                await client.info()


async def test_an_address_without_a_server_is_an_error_soon() -> None:
    unused = ServerProcess()
    begun = time.monotonic()
    with pytest.raises(ConnectionError, match=unused.url):
        async with EnvClient(unused.url, connect_timeout_s=0.5):
            pass
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        EnvClient(url)


def test_the_token_of_the_environment_variable_is_sent_by_every_client(
    guarded: tuple[ServerProcess, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, token = guarded
    monkeypatch.setenv("ROLLGYM_TOKEN", token)
    RemoteEnv(server.url, "Walk-v0").close()
    RemoteVectorEnv(server.url, "Walk-v0", 2).close()
    gymnasium.make("rollgym/Remote-v0", url=server.url, env_id="Walk-v0").close()
    monkeypatch.setenv("ROLLGYM_TOKEN", "another")
    RemoteEnv(server.url, "Walk-v0", token=token).close()
    with pytest.raises(
        ProblemError, match=r"does not know this token: pass its token as token=.*ROLLGYM_TOKEN"
    ):
        RemoteEnv(server.url, "Walk-v0")
    for empty in ("", None):
        monkeypatch.setenv("ROLLGYM_TOKEN", token if empty == "" else "")
        with pytest.raises(
            ProblemError, match=r"this server needs a token: pass its token as token=.*ROLLGYM_TOKEN"
        ):
            RemoteEnv(server.url, "Walk-v0", token=empty)


@pytest.mark.parametrize("token", ["token\n", "two words", "tökén", "a\r\nX-Other: b"])
def test_a_token_that_no_header_can_hold_is_refused_at_once(token: str) -> None:
    with pytest.raises(ValueError, match="line break") as refused:
        EnvClient("http://127.0.0.1:8000", token=token)
    assert token not in str(refused.value)


async def test_something_else_on_the_port_is_an_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="handshake"):
            async with EnvClient(f"ws://127.0.0.1:{port}", connect_timeout_s=0.5):
                pass
