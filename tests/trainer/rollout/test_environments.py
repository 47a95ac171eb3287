"""Sessions that are lent, used again and shared out, and what is said of a server that is gone."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from rollgym.trainer.config.data import EvaluationSetSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.evaluation.evaluation_sets import build_evaluation_set
from rollgym.trainer.rollout.environments import EnvironmentPool, OutageReport
from rollgym.trainer.tasks.task import Task
from tests.support.clock import clock, on_a_clock
from tests.support.processes import env_server

LIMIT = 6


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with env_server("--max-sessions-per-token", str(LIMIT)) as address:
        yield address


@pytest.fixture
async def pool(url: str) -> AsyncIterator[EnvironmentPool]:
    async with EnvironmentPool(url, None, "json", timeout_s=20) as environments:
        yield environments


def task(size: int) -> Task:
    return Task(0, "FrozenLake-v0", seed=1, kwargs={"size": size})


async def play(pool: EnvironmentPool, size: int) -> str:
    async with pool.session(task(size)) as session:
        observation, _ = await session.reset(seed=1)
        await session.step("Right")
        assert len(observation.split("\n")) == size
        return session.session_id


async def sessions(pool: EnvironmentPool) -> int:
    return (await (await pool.client(None)).info()).capacity.sessions


async def test_a_session_is_used_again_for_the_same_environment(pool: EnvironmentPool) -> None:
    first = await play(pool, 3)
    assert await play(pool, 3) == first
    assert await play(pool, 4) != first
    assert await play(pool, 3) == first


async def test_more_episodes_than_the_server_allows_take_their_turns(
    pool: EnvironmentPool, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(60):
        for _ in range(2):
            await asyncio.gather(*(play(pool, 3 + number % 4) for number in range(10 * LIMIT)))
    assert await sessions(pool) <= LIMIT
    assert "at_capacity" not in caplog.text, "the pool knows the limit and never runs into it"


async def test_idle_sessions_make_room_for_other_environments(pool: EnvironmentPool) -> None:
    await asyncio.gather(*(play(pool, 3) for _ in range(LIMIT)))
    async with asyncio.timeout(20):
        await asyncio.gather(*(play(pool, 5) for _ in range(LIMIT)))


async def test_an_episode_that_is_cancelled_while_it_waits_costs_no_place(pool: EnvironmentPool) -> None:
    release = asyncio.Event()

    async def hold() -> None:
        async with pool.session(task(3)):
            await release.wait()

    holding = [asyncio.create_task(hold()) for _ in range(LIMIT)]
    waiting = [asyncio.create_task(play(pool, 3 + number % 2)) for number in range(4)]
    async with asyncio.timeout(20):
        while await sessions(pool) < LIMIT:
            await asyncio.sleep(0.02)
        for each in waiting[:3]:
            each.cancel()
        await asyncio.gather(*waiting[:3], return_exceptions=True)
        release.set()
        await asyncio.gather(*holding, waiting[3])
        await asyncio.gather(*(play(pool, 4) for _ in range(2 * LIMIT)))


async def test_sessions_that_failed_and_idle_ones_are_closed(pool: EnvironmentPool) -> None:
    with pytest.raises(RuntimeError, match="oops"):
        async with pool.session(task(3)):
            raise RuntimeError("oops")
    await asyncio.gather(*(play(pool, 3) for _ in range(3)))
    await pool.shrink()
    async with asyncio.timeout(10):
        while await sessions(pool) > 0:
            await asyncio.sleep(0.02)
    assert await play(pool, 3)


async def test_as_many_sessions_are_lent_at_once_as_there_are_places(pool: EnvironmentPool) -> None:
    assert await pool.places([None, None]) == LIMIT
    async with asyncio.timeout(30):
        async with pool.sessions(task(3), 128) as all_of_them:
            assert len(all_of_them) == LIMIT
            assert await sessions(pool) == LIMIT
        # Whoever comes next finds a place again, though the sessions are closed in the background.
        await asyncio.gather(*(play(pool, 4) for _ in range(LIMIT)))
        async with pool.sessions(task(3), 2) as two:
            assert len(two) == 2
    assert await sessions(pool) <= LIMIT


async def test_an_evaluation_set_is_the_same_however_many_sessions_look_for_it(pool: EnvironmentPool) -> None:
    settings = EvaluationSetSettings(env_id="FrozenLake-v0", kwargs={"size": 3}, episodes=20)
    few = await build_evaluation_set("p", settings, pool)
    with env_server() as roomy:
        async with EnvironmentPool(roomy, None, "json", timeout_s=20) as other:
            many = await build_evaluation_set("p", settings, other)
    assert [each.seed for each in few.tasks] == [each.seed for each in many.tasks]
    assert len(few.tasks) == 20


async def test_a_session_whose_closing_went_wrong_leaves_its_place(
    pool: EnvironmentPool, monkeypatch
) -> None:
    client = await pool.client(None)
    close = client.close_sessions

    async def garbage(closed):
        await close(closed)
        raise KeyError("closed")

    for size in range(3, 3 + LIMIT):
        await play(pool, size)
    with monkeypatch.context() as patched:
        patched.setattr(client, "close_sessions", garbage)
        async with asyncio.timeout(20):
            await play(pool, 2)
    assert await sessions(pool) == LIMIT


ADDRESS = "http://127.0.0.1:65535"
ERROR = f"no server answers at {ADDRESS}: [Errno 111] Connect call failed ('127.0.0.1', 65535)"


def test_what_is_said_of_a_server_that_is_gone_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    console = RunConsole(10, live=False)

    async def outage() -> None:
        report = OutageReport(console, 300.0)
        hear = report.listener(ADDRESS, lambda: 1024)
        hear(ConnectionError(ERROR))
        await asyncio.sleep(0)
        for _ in range(40):
            await clock().forward(1.0)
        hear(None)
        report.close()

    on_a_clock(outage(), frozen=True)
    output = capsys.readouterr().out
    assert f"{ADDRESS} has not answered for 15 s, 1024 episodes wait\n" in output
    assert "the run is saved and ends after 300 s" in output
    assert max(map(len, output.splitlines())) <= 80
