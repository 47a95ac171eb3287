"""Everything at once, at random: no question stays without its answer, and no session is held by what is over.

Those without a token flood the server meanwhile, and between the rounds it crashes and its journal is damaged. Servers
that are not patient refuse what waits for a moment, and more is asked of them than they do in that time.
`INTERLEAVING_S` says how long (20 seconds unless told), `INTERLEAVING_SEED` what is done. With `-s` it tells how often
what was answered, and how long a witness on a connection of its own was kept waiting.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from rollgym.env_server.access.tokens import add_token
from tests.support.interleaved_envs import DIRECTORY, EPISODIC, SERVED, left_open
from tests.support.interleaving import IDLE_S, Round
from tests.support.interleaving_clients import Http
from tests.support.journal_damage import Crash
from tests.support.metrics import scrape, value
from tests.support.wire import Server
from tests.support.witness import Waited, Witness

SECONDS = float(os.environ.get("INTERLEAVING_S", "20"))
SEED = os.environ.get("INTERLEAVING_SEED", "1")
_BURSTS = 12
_ROUNDS_AT_ONCE = 2
_CRASHES = 0.3
_LIMITS = (
    *("--no-builtin", "--workers", "2", "--threads", "4", "--step-timeout-s", "20", "--linger-s", "1"),
    *("--idle-timeout-s", "30", "--max-in-flight", "64"),
)
# Who has no token and sends nothing is not waited for.
_STRANGERS = ("--auth-timeout-s", "2", "--request-timeout-s", "3")
_NOT_PATIENT = ("--max-queue-s", "0.1", "--max-in-flight", "1024")
_GATEWAY = ("--gateway", "--allow-network", "loopback", "--linger-s", "1", "--idle-timeout-s", "30")


class Mortal:
    """A server that can be killed and started again on its port.

    Args:
        *arguments: Its arguments.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.server = Server(*arguments)
        self.port = self.server.port

    def pids(self) -> list[int]:
        """Its process, and those that it has started."""
        pid = self.server.process.pid
        return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]

    def crash(self, meanwhile: Callable[[], None]) -> str:
        """Kill all of it, and start it again; gives its log until then."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.server.stop()
        log = self.server.log()
        meanwhile()
        self.server = Server(*self._arguments, "--port", str(self.port))
        return log


class Served(NamedTuple):
    """The server to ask, and the one that has the environments.

    Attributes:
        asked: The first.
        node: The second, which may be the same.
        token: A token of both.
        state: Where the second one's journals are.
        is_patient: Whether nothing is refused because it has waited.
    """

    asked: Mortal
    node: Mortal
    token: str
    state: Path
    is_patient: bool

    @property
    def all(self) -> tuple[Mortal, ...]:
        return (self.asked,) if self.asked is self.node else (self.asked, self.node)


@pytest.fixture(
    params=["one process", "two processes", "gateway", "one process, not patient", "gateway, not patient"]
)
def served(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Served]:
    opened = tmp_path / "open"
    opened.mkdir()
    monkeypatch.setenv(DIRECTORY, str(opened))
    token = add_token(tmp_path / "tokens.yaml", "somebody", ["play", "register", "admin"])
    own = tmp_path / "token"
    own.write_text(token)
    strangers = ("--token-file", str(tmp_path / "tokens.yaml"), *_STRANGERS)
    state = tmp_path / "state"
    what, _, lack = request.param.partition(", ")
    patience = _NOT_PATIENT if lack else ()
    serving = (*SERVED, *_LIMITS, *patience, "--state-dir", str(state))
    with ExitStack() as stack:

        def start(*arguments: str) -> Mortal:
            mortal = Mortal(*arguments)
            stack.callback(lambda: mortal.server.stop())
            return mortal

        if what == "gateway":
            gateway = start(*_GATEWAY, *strangers, *patience)
            registering = (
                *("--register", gateway.server.url, "--register-token-file", str(own)),
                *("--token-file", str(tmp_path / "tokens.yaml"), "--node-token-file", str(own)),
            )
            yield Served(gateway, start(*serving, *registering), token, state, not lack)
        else:
            alone = start(*serving, *strangers, "--processes", "1" if what == "one process" else "2")
            yield Served(alone, alone, token, state, not lack)


@pytest.mark.timeout(SECONDS / 5 + 300)
async def test_whatever_happens_at_once_each_question_has_one_answer(
    served: Served, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await _until_registered(served)
    loop = asyncio.get_running_loop()
    end = loop.time() + SECONDS / 5
    seed = f"{SEED}/{request.node.callspec.id}"
    chance = random.Random(seed)
    answers: Counter[str] = Counter()
    waited, number, crashes = Waited(), 0, 0
    # Sooner or later it is too much for servers that are not patient.
    while loop.time() < end or not number or not (served.is_patient or answers["overloaded"]):
        pids = _pids(served)
        rounds = [
            Round(
                *(served.asked.port, served.token, f"{seed}/{number + each}"),
                is_too_much=not served.is_patient,
                pids=pids,
            )
            for each in range(_ROUNDS_AT_ONCE)
        ]
        number += _ROUNDS_AT_ONCE
        with Witness(served.asked.port, served.token, pids) as witness:
            await asyncio.gather(*(each.play(_BURSTS) for each in rounds))
        waited += witness.waited
        for each in rounds:
            assert not each.faults, each.faults
            answers += each.answers
        if not crashes or chance.random() < _CRASHES:
            crashes += 1
            answers += await _crash(served, random.Random(f"{seed}/crash {crashes}"))
    print(f"{number} rounds, {crashes} crashes, {answers.total()} answers (seed {seed!r}): {answers}")
    print(f"a witness: {waited}; {await _lag(served)}")
    # How much a server that is not patient still does is the machine's.
    assert answers["ok"] > (answers.total() / 10 if served.is_patient else 0)
    assert waited.steps
    await _until_empty(served)
    assert await _until_closed(tmp_path / "open") == []
    for mortal in served.all:
        _look_at_log(mortal.server.log())


async def _crash(served: Served, chance: random.Random) -> Counter[str]:
    """Let the server that has the environments crash, and look whether any session is behind."""
    http = Http(served.asked.port, served.token)
    crash = Crash(http, chance, served.state)

    async def happen(meanwhile: Callable[[], None]) -> None:
        http.close()
        log = await asyncio.to_thread(served.node.crash, meanwhile)
        _look_at_log(log)
        await _until_registered(served)

    await crash.happen(happen)
    http.close()
    assert not crash.faults, crash.faults
    return crash.answers


def _look_at_log(log: str) -> None:
    """Look whether it tells of what should not have happened; that a journal is damaged has to be there."""
    lines = [line for line in log.splitlines() if " ERROR " in line and "journal" not in line]
    assert not lines, lines[:5]
    assert "never awaited" not in log


async def _lag(served: Served) -> str:
    """What the loop of the server that was asked says of itself, for people; the machine may be busy."""
    samples = await scrape(served.asked.server.url, served.token)
    looks = value(samples, "rollgym_event_loop_lag_seconds_count")
    early = value(samples, "rollgym_event_loop_lag_seconds_bucket", {"le": "0.05"})
    queued = value(samples, "rollgym_event_loop_queued_seconds_total")
    return f"{looks - early:.0f} of {looks:.0f} timers over 50 ms late, {queued:.1f} s without a processor"


def _pids(served: Served) -> list[int]:
    return [pid for each in served.all for pid in each.pids()]


async def _until_registered(served: Served) -> None:
    async with served.asked.server.http(served.token) as http, asyncio.timeout(60):
        while len((await http.get("/v1/envs")).json()["envs"]) < len(EPISODIC) + 1:
            await asyncio.sleep(0.05)


async def _until_empty(served: Served) -> None:
    """Wait until the time of all sessions is over: no operation that is over holds one."""
    for mortal in served.all:
        async with mortal.server.http(served.token) as http, asyncio.timeout(10 * IDLE_S):
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
