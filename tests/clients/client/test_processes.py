"""One client and a server of several I/O processes on one port."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollgym.clients.client.client import EnvClient
from tests.support.client_envs import Walk
from tests.support.client_server import ENVS, ServerProcess

ACTIONS = ["left", "", "right", "up"]


def local_episode(seed: int) -> list[Any]:
    env = Walk(risk=0.0)
    results: list[Any] = [env.reset(seed=seed)]
    return results + [env.step(action) for action in ACTIONS]


@pytest.fixture(scope="module")
def wide_server() -> Any:
    with ServerProcess([*ENVS, "--processes", "3"]) as running:
        yield running


@pytest.fixture
async def client(wide_server: ServerProcess) -> AsyncIterator[EnvClient]:
    async with EnvClient(wide_server.url) as running:
        yield running


async def test_sessions_are_spread_and_reached_without_a_hop(client: EnvClient) -> None:
    assert (await client.info()).processes == 3
    sessions = await client.make_many("Walk-v0", 12, {"risk": 0.0})
    assert Counter(session.process for session in sessions) == {0: 4, 1: 4, 2: 4}
    # The owner is the first part of the id: the socket that a session is reached on leads to its owner.
    assert all(session.session_id.startswith(f"{session.process}.") for session in sessions)
    begun = await client.reset_many([(session, seed) for seed, session in enumerate(sessions)])
    episodes = [[each] for each in begun]
    for action in ACTIONS:
        for episode, result in zip(
            episodes, await client.step_many([(session, action) for session in sessions]), strict=True
        ):
            episode.append(result)
    assert episodes == [local_episode(seed) for seed in range(12)]
    assert await client.close_sessions(sessions) == 12


async def test_a_process_killed_in_mid_episode_is_not_noticed(
    wide_server: ServerProcess, client: EnvClient
) -> None:
    sessions = await client.make_many("Walk-v0", 6, {"risk": 0.0})

    async def play(session: Any, seed: int) -> list[Any]:
        results: list[Any] = [await session.reset(seed)]
        for action in ACTIONS:
            await asyncio.sleep(0.15)
            results.append(await session.step(action))
        return results

    playing = asyncio.gather(*(play(session, seed) for seed, session in enumerate(sessions)))
    await asyncio.sleep(0.3)
    victim = wide_server.children()[-1]
    os.kill(victim, signal.SIGKILL)
    assert await playing == [local_episode(seed) for seed in range(6)]


@pytest.mark.slow
async def test_a_process_that_hangs_is_replaced(wide_server: ServerProcess, client: EnvClient) -> None:
    sessions = await client.make_many("Walk-v0", 6, {"risk": 0.0})
    episodes: list[list[Any]] = [[await session.reset(seed)] for seed, session in enumerate(sessions)]
    before = wide_server.children()
    victim = before[-1]
    os.kill(victim, signal.SIGSTOP)
    for action in ACTIONS:
        for episode, session in zip(episodes, sessions, strict=True):
            episode.append(await session.step(action))
    assert episodes == [local_episode(seed) for seed in range(6)]
    assert victim not in wide_server.children()
