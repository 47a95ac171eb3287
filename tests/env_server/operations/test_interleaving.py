"""Everything at once, at random: no question stays without its answer, and no session is held by what is over.

`INTERLEAVING_S` says how long (20 seconds unless told), `INTERLEAVING_SEED` what is done.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.interleaved_envs import DIRECTORY, EPISODIC, SERVED, left_open
from tests.support.interleaving import IDLE_S, Round
from tests.support.wire import Server

SECONDS = float(os.environ.get("INTERLEAVING_S", "20"))
SEED = os.environ.get("INTERLEAVING_SEED", "1")
_BURSTS = 12
_ROUNDS_AT_ONCE = 2
_LIMITS = (
    *("--no-builtin", "--workers", "2", "--threads", "4", "--step-timeout-s", "20", "--linger-s", "1"),
    *("--idle-timeout-s", "30", "--max-in-flight", "64"),
)


@pytest.fixture(params=["one process", "two processes", "gateway"])
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Server, ...]]:
    """The server to ask, and what is behind it."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    with ExitStack() as stack:
        if request.param == "gateway":
            gateway = stack.enter_context(
                Server(
                    "--gateway", "--allow-network", "loopback", "--linger-s", "1", "--idle-timeout-s", "30"
                )
            )
            node = stack.enter_context(Server(*SERVED, *_LIMITS, "--register", gateway.url))
            yield gateway, node
        else:
            processes = "1" if request.param == "one process" else "2"
            yield (stack.enter_context(Server(*SERVED, *_LIMITS, "--processes", processes)),)


@pytest.mark.timeout(SECONDS / 3 + 120)
async def test_whatever_happens_at_once_each_question_has_one_answer(
    served: tuple[Server, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = served[0]
    await _until_registered(asked)
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS / 3
    answers: Counter[str] = Counter()
    number = 0
    while loop.time() < end or not number:
        rounds = [
            Round(asked.port, f"{SEED}/{request.node.callspec.id}/{number + each}")
            for each in range(_ROUNDS_AT_ONCE)
        ]
        number += _ROUNDS_AT_ONCE
        await asyncio.gather(*(each.play(_BURSTS) for each in rounds))
        for each in rounds:
            assert not each.faults, each.faults
            answers += each.answers
    print(f"{number} rounds, {answers.total()} answers: {answers}")
    assert answers["ok"] > answers.total() / 10
    for server in served:
        await _until_empty(server)
    assert await _until_closed(tmp_path) == []
    for server in served:
        log = server.log()
        assert " ERROR " not in log, log[log.index(" ERROR ") - 40 :][:3000]
        assert "never awaited" not in log


async def _until_registered(server: Server) -> None:
    async with server.http() as http, asyncio.timeout(60):
        while len((await http.get("/v1/envs")).json()["envs"]) < len(EPISODIC) + 1:
            await asyncio.sleep(0.05)


async def _until_empty(server: Server) -> None:
    """Wait until the time of all sessions is over: no operation that is over holds one."""
    async with server.http() as http, asyncio.timeout(10 * IDLE_S):
        while (await _capacity(http))["sessions"]:
            await asyncio.sleep(0.1)


async def _capacity(http: httpx.AsyncClient) -> dict[str, int]:
    found: dict[str, int] = (await http.get("/v1/info")).json()["capacity"]
    return found


async def _until_closed(directory: Path) -> list[str]:
    """The environments that are open though no session is; calls that were given up come to their end first."""
    for _ in range(100):
        if not left_open(directory):
            break
        await asyncio.sleep(0.05)
    return left_open(directory)
