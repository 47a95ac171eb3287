"""Broken connections and restarted servers in mid-episode are invisible."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_envs import Walk
from tests.support.client_server import ENVS, Proxy, ServerProcess, proxy_before

ACTIONS = ["left", "", "right", "漢字", "left", "up", "x" * 50, "down"] * 3


def local_episode(seed: int, actions: list[str] = ACTIONS) -> list[Any]:
    env = Walk(risk=0.0)
    results: list[Any] = [env.reset(seed=seed)]
    return results + [env.step(action) for action in actions]


@pytest.fixture
async def proxy(server: ServerProcess) -> AsyncIterator[Proxy]:
    async with proxy_before(server) as running:
        yield running


async def test_a_step_whose_reply_was_lost_is_taken_once(proxy: Proxy) -> None:
    async with EnvClient(proxy.url) as client:
        session = await client.make("Walk-v0", {"risk": 0.0})
        results: list[Any] = [await session.reset(3)]
        for action in ACTIONS:
            step = asyncio.create_task(session.step(action))
            await proxy.lose_next_reply()
            results.append(await step)
        assert results == local_episode(3)
        assert proxy.connections == 1 + len(ACTIONS)


async def test_a_handshake_that_came_too_late_is_begun_anew() -> None:
    """As of a machine that was suspended between connecting and sending: nothing of it is invalid."""
    with ServerProcess([*ENVS, "--request-timeout-s", "1"]) as server:
        async with proxy_before(server) as proxy:
            proxy.stands_still_s = 1.5
            async with EnvClient(proxy.url) as client:
                assert await client.info()
            assert proxy.connections > 1


async def test_resets_and_sessions_whose_reply_was_lost_are_made_once(proxy: Proxy) -> None:
    async with EnvClient(proxy.url) as client:
        before = (await client.info()).capacity.sessions
        making = asyncio.create_task(client.make_many("Walk-v0", 3, {"risk": 0.0}))
        await proxy.lose_next_reply()  # of the catalog
        await proxy.lose_next_reply()  # of the making
        sessions = await making
        assert (await client.info()).capacity.sessions == before + 3
        reset = asyncio.create_task(sessions[0].reset())
        await proxy.lose_next_reply()
        begun = await reset
        assert sessions[0].episode == 0
        assert begun == local_episode(sessions[0].seed or 0, [])[0]


async def test_a_batch_whose_reply_was_lost_is_taken_once(proxy: Proxy) -> None:
    async with EnvClient(proxy.url, encoding="msgpack") as client:
        sessions = await client.make_many("Walk-v0", 6, {"risk": 0.0})
        await client.reset_many([(session, 9) for session in sessions])
        expected = local_episode(9)[1:]
        for action, result in zip(ACTIONS, expected, strict=True):
            step = asyncio.create_task(client.step_many([(session, action) for session in sessions]))
            await proxy.lose_next_reply()
            assert await step == [result] * 6


async def test_many_sessions_survive_cuts_at_any_time(proxy: Proxy) -> None:
    async def play(session: Any, seed: int) -> list[Any]:
        results: list[Any] = [await session.reset(seed)]
        for action in ACTIONS:
            results.append(await session.step(action))
            await asyncio.sleep(0)
        return results

    async def cut(stream: random.Random) -> None:
        # Not without end: where connecting takes longer than a cut comes after another, nobody would get through.
        for _ in range(50):
            await asyncio.sleep(stream.uniform(0.0, 0.05))
            proxy.cut()

    async with EnvClient(proxy.url) as client:
        sessions = await client.make_many("Walk-v0", 30, {"risk": 0.0})
        cutting = asyncio.create_task(cut(random.Random(0)))
        episodes = await asyncio.gather(*(play(session, seed) for seed, session in enumerate(sessions)))
        cutting.cancel()
        assert episodes == [local_episode(seed) for seed in range(30)]


async def test_a_step_that_still_runs_is_joined_after_a_cut(proxy: Proxy) -> None:
    async with EnvClient(proxy.url) as client:
        session = await client.make("Slow-v0", {"risk": 0.0})
        await session.reset(2)
        step = asyncio.create_task(session.step("sleep 0.8"))
        await asyncio.sleep(0.2)
        proxy.cut()
        assert await step == local_episode(2, ["sleep 0.8"])[1]
        assert session.step_index == 1


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
async def test_a_server_killed_in_mid_episode_is_not_noticed(encoding: Any) -> None:
    with ServerProcess() as server:
        async with EnvClient(server.url, encoding=encoding) as client:
            session = await client.make("Walk-v0", {"risk": 0.0})
            arm = await client.make("Arm-v0")
            results: list[Any] = [await session.reset(11)]
            begun, _ = await arm.reset(3)
            for index, action in enumerate(ACTIONS):
                if index in (4, 5):
                    await asyncio.to_thread(server.kill)
                    step = asyncio.create_task(session.step(action))
                    await asyncio.sleep(0.1)
                    await asyncio.to_thread(server.start)
                    results.append(await step)
                else:
                    results.append(await session.step(action))
            assert results == local_episode(11)
            record = await session.episode_record()
            assert (record.seed, record.actions) == (11, ACTIONS)
            again, _ = await arm.reset(3)
            assert encoded(again) == encoded(begun)


def encoded(observation: Any) -> Any:
    return {key: value.tolist() if hasattr(value, "tolist") else value for key, value in observation.items()}


async def test_a_batch_goes_on_after_a_restart() -> None:
    with ServerProcess() as server:
        async with EnvClient(server.url) as client:
            sessions = await client.make_many("Walk-v0", 8, {"risk": 0.0})
            await client.reset_many([(session, seed) for seed, session in enumerate(sessions)])
            for position, action in enumerate(ACTIONS):
                if position == 5:
                    await asyncio.to_thread(server.stop)
                    await asyncio.to_thread(server.start)
                results = await client.step_many([(session, action) for session in sessions])
                assert results == [local_episode(seed)[position + 1] for seed in range(8)]


async def test_what_is_not_deterministic_is_lost_and_can_begin_anew() -> None:
    with ServerProcess() as server:
        async with EnvClient(server.url) as client:
            session = await client.make("Dice-v0", {"risk": 0.0})
            await session.reset(1)
            await session.step("left")
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            with pytest.raises(ProblemError) as lost:
                await session.step("left")
            assert lost.value.code in ("session_gone", "unknown_session")
            assert await session.reset(1) == local_episode(1, [])[0]
            assert await session.step("left") == local_episode(1, ["left"])[1]


async def test_an_episode_that_replays_differently_is_never_passed_off_as_the_same() -> None:
    with ServerProcess() as server:
        async with EnvClient(server.url) as client:
            session = await client.make("Walk-v0", {"risk": 0.0})
            await session.reset(1)
            await session.step("left")
            await asyncio.to_thread(server.kill)
            server.arguments = [part.replace("client_envs:Walk", "client_envs:OtherWalk") for part in ENVS]
            await asyncio.to_thread(server.start)
            with pytest.raises(ProblemError) as gone:
                await session.step("right")
            assert (gone.value.code, gone.value.extra["reason"]) == ("session_gone", "replay_diverged")


async def test_a_server_that_never_comes_back_is_an_error_in_time() -> None:
    with ServerProcess() as server:
        async with EnvClient(server.url, reconnect_timeout_s=0.6) as client:
            session = await client.make("Walk-v0")
            await session.reset(0)
            await asyncio.to_thread(server.kill)
            with pytest.raises(ConnectionError, match=server.url):
                await session.step("left")


async def test_a_server_that_does_not_answer_is_an_error_in_time(proxy: Proxy) -> None:
    async with EnvClient(proxy.url, timeout_s=1.0) as client:
        session = await client.make("Walk-v0")
        await session.reset(0)
        proxy.loses_replies = True
        with pytest.raises(TimeoutError):
            await session.step("left")
        proxy.cut()
        await session.step("left")  # the same step again: it was taken once
        assert session.step_index == 1


async def test_sessions_whose_player_thinks_are_kept_when_the_socket_drops() -> None:
    with ServerProcess([*ENVS, "--linger-s", "0.5"]) as server:
        async with proxy_before(server) as proxy, EnvClient(proxy.url) as client:
            session = await client.make("Dice-v0", {"risk": 0.0})  # could not be rebuilt
            await session.reset(4)
            await session.step("left")
            proxy.cut()
            await asyncio.sleep(1.5)
            assert await session.step("right") == local_episode(4, ["left", "right"])[2]


@pytest.fixture
async def behind(server: ServerProcess) -> AsyncIterator[tuple[EnvClient, Any, list[Any]]]:
    """A session whose server has it three steps behind what was answered, and what was answered."""
    async with EnvClient(server.url) as client:
        session = await client.make("Walk-v0", {"risk": 0.0})
        seen: list[Any] = [await session.reset(4)]
        for action in ACTIONS[:3]:
            seen.append(await session.step(action))
        early = await client.restore(await session.episode_record())
        for action in ACTIONS[3:6]:
            seen.append(await session.step(action))
        session.session_id = early.session_id
        early.mark_closed()
        yield client, session, seen


async def test_a_session_that_went_back_is_restored_where_the_client_is(
    behind: tuple[EnvClient, Any, list[Any]], server: ServerProcess
) -> None:
    client, session, seen = behind
    before = session.session_id
    seen.append(await session.step(ACTIONS[6]))
    assert seen == local_episode(4, ACTIONS[:7])
    assert session.session_id != before
    with pytest.raises(ProblemError, match="session_gone"):
        await client._caller.call({"op": "session", "session_id": before}, None, client._caller.deadline())


async def test_a_batch_restores_a_session_that_went_back(behind: tuple[EnvClient, Any, list[Any]]) -> None:
    client, session, seen = behind
    seen += await client.step_many([(session, ACTIONS[6])])
    seen += await client.step_many([(session, ACTIONS[7])])
    assert seen == local_episode(4, ACTIONS[:8])


async def test_a_step_that_another_action_was_taken_for_is_no_reason_to_restore(
    server: ServerProcess,
) -> None:
    async with EnvClient(server.url) as client:
        session = await client.make("Walk-v0", {"risk": 0.0})
        await session.reset(4)
        await session.step("left")
        session_id = session.session_id
        again = {"op": "step", "action": "right", "episode": 0, "step": 0}
        for fields in (again, again | {"step": 7}, again | {"episode": 3}):
            with pytest.raises(ProblemError, match="step_mismatch"):
                await session.call(dict(fields))
        assert session.session_id == session_id
        assert await session.step("") == local_episode(4, ["left", ""])[2]
