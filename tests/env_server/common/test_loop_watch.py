"""What keeps the event loop is named: the environment, the operation, and where the loop stands while it does."""

import logging
import queue
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from rollgym.env_server.common.loop_watch import LoopWatch, StandstillWatch
from rollgym.env_server.common.metrics import EnvironmentLabels, Metrics, OperationTimes
from tests.support.metrics import scrape, value
from tests.support.wire import ENVS, INLINE, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    arguments = ("--isolation", "Equal=thread", "--verify-timeout-s", "2", "--log-level", "warning")
    with Server(*ENVS, *INLINE, *arguments) as running:
        yield running


async def held(server: Server, env_id: str, op: str, isolation: str) -> float:
    labels = {"env_id": env_id, "op": op, "isolation": isolation}
    return value(await scrape(server.url), "rollgym_event_loop_holds_total", labels)


async def test_slow_steps_and_resets_that_run_inline_are_named(server: Server) -> None:
    async with server.socket() as socket:
        made = await socket.make()
        await socket.call("step", session_id=made, action="sleep 1")
        line = server.wait_for("step of Count")
        assert "everybody on this process waited" in line
        assert "--isolation Count=process" in line
        await socket.call("reset", session_id=made, options={"sleep": 1})
        server.wait_for("reset of Count")
        slow = await socket.make("SlowCount")
        await socket.call("step", session_id=slow, action="sleep 0.3")
        await socket.call("close", session_ids=[made, slow])
    assert await held(server, "Count", "step", "inline") == 1
    assert await held(server, "SlowCount", "step", "inline") == 0


@pytest.mark.parametrize(("queued_s", "named"), [(0.0, True), (0.2, False)])
async def test_waiting_for_a_processor_is_not_blamed_on_an_environment(
    queued_s: float, named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queued = iter([1.0, 1.0 + queued_s, 1.0 + queued_s])
    monkeypatch.setattr("rollgym.env_server.common.loop_watch.queued_seconds", lambda: next(queued))
    times = OperationTimes()
    watch = LoopWatch(Metrics(EnvironmentLabels(1)), {"inline": times})
    watch.start()
    times.note_long("reset", "FrozenLake-v0", 0.25)
    watch._look()
    watch.stop()
    assert ("reset of FrozenLake-v0" in caplog.text) is named


async def test_a_verifier_that_keeps_the_loop_from_a_thread_is_named(server: Server) -> None:
    async with server.http() as client:
        items = [{"response": "hold 0.9", "answer": "4"}]
        assert (await client.post("/v1/verify/Equal", json={"items": items})).status_code == 200
    assert "the event loop had no turn" in server.wait_for("verify of Equal")
    assert await held(server, "Equal", "verify", "thread") >= 1


async def test_what_takes_too_long_elsewhere_is_named(server: Server) -> None:
    async with server.http() as client, server.socket() as socket:
        items = [{"response": "sleep 3", "answer": "4"}]
        reply = await client.post("/v1/verify/Equal", json={"items": items, "timeout_s": 0.1})
        assert reply.json()["results"][0]["outcome"] == "timeout"
        server.wait_for("verify of Equal: no answer within 0.1 s")
        slow = await socket.make("SlowCount")
        answer = await socket.ask("step", session_id=slow, action="sleep 30", timeout_s=0.1)
        assert answer["error"]["code"] == "step_timeout"
        assert slow in server.wait_for("step of SlowCount")
        await socket.call("close", session_ids=[slow])


class _Late:
    """A loop that is as late as a test says.

    Attributes:
        seconds: How late.
        looks: How often somebody looked.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.looks = 0

    @property
    def late_s(self) -> float:
        self.looks += 1
        return self.seconds


def test_a_loop_that_stands_still_is_told_of_while_it_does() -> None:
    told: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.put(record)

    def stand_here() -> None:
        text = told.get(timeout=60).getMessage()
        assert "stands still for 9 s" in text
        assert "in stand_here" in text

    late = _Late()
    listener = Listener()
    log = logging.getLogger("rollgym.env_server.common.loop_watch")
    log.addHandler(listener)
    try:
        with StandstillWatch(cast(Any, late), after_s=0.02):
            for _ in range(2):
                late.seconds = 9.0
                stand_here()
                late.seconds, looks = 0.0, late.looks
                while late.looks < looks + 2:
                    time.sleep(0.001)
            assert told.empty(), "once each time"
    finally:
        log.removeHandler(listener)
