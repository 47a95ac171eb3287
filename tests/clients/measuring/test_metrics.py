"""What a busy machine adds to a time is told apart from what takes the time."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from rollgym.clients.audit.costs import _cost
from rollgym.clients.checks.costs import _clock, _once
from rollgym.clients.measuring.metrics import queued_by_metrics, queued_seconds
from tests.support.client_server import ServerProcess
from tests.support.processes import running


@pytest.fixture
def crowded() -> Iterator[None]:
    """This thread shares one processor with three others that are never done."""
    before = os.sched_getaffinity(0)
    with ExitStack() as others:
        try:
            os.sched_setaffinity(0, {min(before)})
            for _ in range(3):
                command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
                other = others.enter_context(running(subprocess.Popen(command, stdout=subprocess.PIPE)))
                assert other.stdout is not None
                assert other.stdout.readline() == b"\n"
            yield
        finally:
            os.sched_setaffinity(0, before)


def _busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_waiting_for_a_processor_is_told_apart_from_working_and_sleeping(crowded: None) -> None:
    begun = time.perf_counter()
    clock = _clock(inline=True)
    held = _once(clock, lambda: _busy(0.1))
    taken = time.perf_counter() - begun
    assert taken > 0.2
    assert 0.1 <= held < 0.5 * taken
    assert _once(clock, lambda: time.sleep(0.1)) >= 0.099
    assert _once(_clock(inline=False), lambda: time.sleep(0.1)) < 0.05, "nobody else waits for it"


@pytest.mark.parametrize(
    ("held", "queued", "seen"), [(0.01, 0.06, False), (0.06, 0.02, True), (0.06, None, True)]
)
async def test_what_a_server_stood_in_line_for_is_not_held_against_its_environments(
    held: float, queued: float | None, seen: bool
) -> None:
    """An act of so many seconds at a server that each time waited so long for a processor."""
    waited = 0.0

    async def act() -> None:
        nonlocal waited
        await asyncio.sleep(held + (queued or 0.0))
        waited += queued or 0.0

    subject = SimpleNamespace(queued_seconds=lambda: None if queued is None else waited)
    seconds = await _cost(subject, act)  # type: ignore[arg-type]
    assert (seconds >= 0.05) is seen
    assert held <= seconds


def test_servers_tell_it(server: ServerProcess) -> None:
    told = queued_by_metrics(server.url, None)
    own = queued_seconds(server.pid)
    assert told is not None
    assert own is not None
    assert 0.0 <= told <= own


def test_who_is_not_there_tells_nothing() -> None:
    assert queued_seconds(2**22 + 1) is None
    assert queued_by_metrics("http://127.0.0.1:9", None) is None
