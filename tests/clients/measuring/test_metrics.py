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

from rollgym.clients.audit.card import CardVerdict
from rollgym.clients.audit.costs import _cost, _held
from rollgym.clients.checks.costs import _clock, _once
from rollgym.clients.checks.costs import _cost as _local_cost
from rollgym.clients.measuring.metrics import (
    MachineSpeed,
    queued_by_metrics,
    queued_seconds,
    seconds_out_of_line,
)
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
    assert _once(clock, lambda: time.sleep(0.1)) >= 0.05
    assert _once(_clock(inline=False), lambda: time.sleep(0.1)) < 0.05, "nobody else waits for it"


@pytest.mark.parametrize(
    ("held", "queued", "seen"),
    [(0.01, 0.06, False), (0.01, 0.3, False), (0.06, 0.02, True), (0.06, None, True), (0.3, 0.01, True)],
)
async def test_what_a_server_stood_in_line_for_is_not_held_against_its_environments(
    held: float, queued: float | None, seen: bool
) -> None:
    """An act of so many seconds at a server that each time waited so long for a processor."""
    waited = 0.0

    async def act() -> None:
        nonlocal waited
        # By the clock that measures it: a timer goes on while this thread stands in line, and that clock does not.
        until = seconds_out_of_line() + held + (queued or 0.0)
        while (left := until - seconds_out_of_line()) > 0:
            await asyncio.sleep(left)
        waited += queued or 0.0

    subject = SimpleNamespace(queued_seconds=lambda: None if queued is None else waited)
    cost = await _cost(subject, act, MachineSpeed())  # type: ignore[arg-type]
    assert (cost.seconds >= 0.05) is seen
    assert held <= cost.seconds


class _Slowed(MachineSpeed):
    """Of a machine that became so much slower after it was first seen."""

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown

    def slowdown(self) -> float:
        return self._slowdown


@pytest.mark.parametrize(
    ("held", "slowdown", "audited", "checked"),
    [
        (0.01, 3.0, CardVerdict.OK, True),
        (0.08, 1.1, CardVerdict.FAILED, False),
        (0.08, 3.0, CardVerdict.SKIPPED, False),
        (0.3, 3.0, CardVerdict.FAILED, False),
    ],
)
async def test_what_is_slow_on_a_slow_machine_alone_neither_passes_nor_fails(
    held: float, slowdown: float, audited: CardVerdict, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By a clock of the test's own: this machine may be busy, too.
    now = 0.0

    def act_at_once() -> None:
        nonlocal now
        now += held

    async def act() -> None:
        act_at_once()

    monkeypatch.setattr("rollgym.clients.audit.costs.seconds_out_of_line", lambda: now)
    subject = SimpleNamespace(queued_seconds=lambda: None)
    cost = await _cost(subject, act, _Slowed(slowdown))  # type: ignore[arg-type]
    entry = _held("reset holds nobody up", cost, "so long", "be quick")
    assert entry.verdict is audited
    assert ("could not be measured: so long" in entry.detail) is (audited is CardVerdict.SKIPPED)
    local = _local_cost(lambda: now, act_at_once, _Slowed(slowdown))
    assert (local.seconds < 0.05) is checked
    assert (local.undisturbed >= 0.05) is (audited is CardVerdict.FAILED)


async def test_an_act_that_is_measured_again_finds_room_in_its_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, since_room, most = 0.0, 0, 0

    async def act() -> None:
        nonlocal now, since_room, most
        now += 0.08
        since_room += 1
        most = max(most, since_room)

    async def make_room() -> None:
        nonlocal now, since_room
        now += 1.0
        since_room = 0

    monkeypatch.setattr("rollgym.clients.audit.costs.seconds_out_of_line", lambda: now)
    subject = SimpleNamespace(queued_seconds=lambda: None)
    cost = await _cost(subject, act, _Slowed(3.0), make_room)  # type: ignore[arg-type]
    assert cost.seconds == pytest.approx(0.08), "making room is not measured"
    assert most <= 4, "actions of four megabytes fill the sixteen of an episode"


def test_a_yardstick_never_finds_a_machine_faster_than_at_its_best() -> None:
    machine_speed = MachineSpeed()
    assert min(machine_speed.slowdown() for _ in range(5)) >= 1.0


def test_servers_tell_it(server: ServerProcess) -> None:
    told = queued_by_metrics(server.url, None)
    own = queued_seconds(server.pid)
    assert told is not None
    assert own is not None
    assert 0.0 <= told <= own


def test_who_is_not_there_tells_nothing() -> None:
    assert queued_seconds(2**22 + 1) is None
    assert queued_by_metrics("http://127.0.0.1:9", None) is None
