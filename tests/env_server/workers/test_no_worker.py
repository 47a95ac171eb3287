"""What cannot be run, for want of a worker, is not said to have taken too long."""

import asyncio
import os
import sys
import threading
from typing import Any

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.logs import LogFormat
from rollgym.env_server.common.metrics import OperationTimes
from rollgym.env_server.operations.runner import not_in_time
from rollgym.env_server.workers import child_process, process
from rollgym.env_server.workers.base import EnvSource, NoWorker, OperationTimeout
from rollgym.env_server.workers.child_process import ChildProcess
from rollgym.env_server.workers.process import ProcessWorker
from rollgym.env_server.workers.thread import ThreadWorker
from rollgym.envs.verifiers.function import TaskVerifier
from tests.support.virtual_time import run_virtually

GO_ON = threading.Event()


class Patient(TaskVerifier):
    """Waits for as long as it is told to."""

    tasks = ({"question": "How long?"},)

    def grade(self, response: str, task: Any) -> bool:
        return GO_ON.wait()


PATIENT = EnvSource("class", f"{__name__}:Patient")
ITEMS = [{"response": str(number)} for number in range(3)]


def no_child(*_: Any) -> Any:
    raise OSError("Resource temporarily unavailable")


def test_responses_that_no_child_could_be_started_for_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ChildProcess", no_child)

    async def verify() -> Any:
        worker = ProcessWorker(1, "text")
        try:
            return await worker.verify(PATIENT, ITEMS, timeout=1.0)
        finally:
            await worker.shutdown()

    verdict = {"score": 0.0, "outcome": "error"}
    detail = "no worker process could be started in time"
    assert run_virtually(verify()) == [verdict | {"detail": detail}] * 3


def test_an_environment_that_no_child_could_be_started_for_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ChildProcess", no_child)

    async def make() -> ProblemError:
        worker = ProcessWorker(1, "text")
        with pytest.raises(NoWorker) as raised:
            await worker.make("0.a", PATIENT, {}, timeout=4.0)
        await worker.shutdown()
        return not_in_time("Patient was not ready in time", raised.value)

    problem = run_virtually(make())
    assert str(problem) == (
        "step_timeout: Patient was not ready in time: no worker process could be started in time"
    )
    assert (
        not_in_time("it was not ready in time", OperationTimeout("late")).detail == "it was not ready in time"
    )


async def test_a_response_that_all_threads_were_stuck_for_is_an_error() -> None:
    worker = ThreadWorker(1)
    try:
        (late,) = await worker.verify(PATIENT, ITEMS[:1], timeout=0.05)
        assert (late["outcome"], late["detail"]) == ("timeout", "no answer within 0.05 s")
        (waited,) = await worker.verify(PATIENT, ITEMS[:1], timeout=0.05)
        assert (waited["outcome"], waited["detail"]) == ("error", "all 1 threads are stuck")
    finally:
        GO_ON.set()
        await worker.shutdown()


async def test_nothing_is_left_of_a_child_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(child_process, "_START_TIMEOUT_S", 0.05)
    failed: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="/nowhere/python"):
        ChildProcess(lambda child: None, OperationTimes(), "text")
    assert os.listdir("/proc/self/fd") == before
    await asyncio.sleep(0.2)
    assert not failed


async def test_nothing_is_left_of_a_child_that_no_thread_can_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start, started = child_process._start, []

    def noted_start(log_format: LogFormat) -> Any:
        started.append(start(log_format))
        return started[0]

    monkeypatch.setattr(child_process, "_start", noted_start)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="can't start new thread"):
        ChildProcess(lambda child: None, OperationTimes(), "text")
    ((child, _),) = started
    assert child.returncode is not None
    assert os.listdir("/proc/self/fd") == before
