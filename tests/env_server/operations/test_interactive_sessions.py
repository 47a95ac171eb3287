"""What becomes of a program that is spoken to, when whoever asked for it is cancelled, or the server ends beside it."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.access.context import Context
from rollgym.env_server.access.tokens import Caller
from rollgym.env_server.common.io_process import Unanswered
from rollgym.env_server.common.settings import SandboxSettings
from rollgym.env_server.http.interactive_socket import _InteractiveSocket
from rollgym.env_server.operations.sandbox import InteractiveSessions, ServedSandbox
from rollgym.sandbox.core.base import CancellableSandbox, Program, SandboxSession, SandboxUnavailableError
from rollgym.sandbox.selection import open_cancellable

CALLER = Caller("someone", frozenset({"play"}))
FOREVER = {"language": "python", "code": "import time; time.sleep(300)", "run_timeout": 300}
ECHO = {"language": "bash", "code": "cat", "run_timeout": 300}


class Gate(ServedSandbox):
    """A sandbox of this machine that says when it is asked for a session, and starts one when it is told to."""

    def __init__(self, settings: SandboxSettings, sandbox: CancellableSandbox) -> None:
        super().__init__(settings)
        self._inner = sandbox
        self.asked = threading.Semaphore(0)
        self.starts = threading.Event()
        self.starts.set()
        self.failure: Exception | None = None
        self.opened: list[SandboxSession] = []

    @property
    def sandbox(self) -> Any:
        return self

    def open_session(self, program: Program, **options: Any) -> SandboxSession:
        self.asked.release()
        assert self.starts.wait(30)
        if self.failure is not None:
            raise self.failure
        self.opened.append(self._inner.open_session(program, **options))
        return self.opened[-1]

    async def is_asked(self) -> None:
        await asyncio.to_thread(self.asked.acquire)


@pytest.fixture(scope="module")
def local() -> Iterator[CancellableSandbox]:
    sandbox = open_cancellable("auto")
    yield sandbox
    sandbox.close()


@pytest.fixture
def settings() -> SandboxSettings:
    return SandboxSettings(sandbox="auto", max_program_sessions=1)


@pytest.fixture
def gate(settings: SandboxSettings, local: CancellableSandbox) -> Iterator[Gate]:
    gate = Gate(settings, local)
    yield gate
    gate.starts.set()
    for session in gate.opened:
        session.close()


async def is_free(sessions: InteractiveSessions, fields: Mapping[str, Any] = FOREVER) -> None:
    """Wait until the only place is free, and see that it is one."""
    async with asyncio.timeout(20):
        while True:
            try:
                program = await sessions.open(CALLER, fields)
            except ProblemError as problem:
                if problem.code != "at_capacity":
                    raise
                await asyncio.sleep(0.01)
                continue
            with pytest.raises(ProblemError, match="1 interactive sessions"):
                await sessions.open(CALLER, fields)
            await program.close()
            return


async def first_is_ended(gate: Gate) -> None:
    """Wait until the first program has been there, and runs no more."""
    async with asyncio.timeout(20):
        while not gate.opened or gate.opened[0].alive:
            await asyncio.sleep(0.01)


async def test_who_is_cancelled_while_a_program_starts_leaves_none(
    settings: SandboxSettings, gate: Gate
) -> None:
    sessions = InteractiveSessions(settings, gate)
    gate.starts.clear()
    opening = asyncio.create_task(sessions.open(CALLER, FOREVER))
    await gate.is_asked()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(5):
            await opening
    with pytest.raises(ProblemError, match="1 interactive sessions"):
        await sessions.open(CALLER, FOREVER)  # the place is taken for as long as there is something in it
    gate.starts.set()
    await is_free(sessions)
    await first_is_ended(gate)
    await sessions.close()


async def test_who_is_cancelled_as_its_program_is_there_leaves_none(
    settings: SandboxSettings, gate: Gate
) -> None:
    sessions = InteractiveSessions(settings, gate)
    gate.starts.clear()
    opening = asyncio.create_task(sessions.open(CALLER, FOREVER))
    await gate.is_asked()
    gate.starts.set()
    # The loop stands still meanwhile: it hears of the program and of the cancellation at once.
    while not gate.opened:
        pass
    opening.cancel()
    await asyncio.wait({opening})
    await is_free(sessions)
    await first_is_ended(gate)
    await sessions.close()


async def test_who_is_cancelled_before_its_first_turn_starts_nothing(
    settings: SandboxSettings, gate: Gate
) -> None:
    sessions = InteractiveSessions(settings, gate)
    opening = asyncio.create_task(sessions.open(CALLER, FOREVER))
    opening.cancel()
    await asyncio.wait({opening})
    assert not gate.opened
    await is_free(sessions)
    await sessions.close()


@pytest.mark.parametrize("cancelled", ["not at all", "before", "after", "at its end too"])
async def test_a_server_that_ends_while_a_program_starts_leaves_none(
    settings: SandboxSettings, gate: Gate, cancelled: str
) -> None:
    sessions = InteractiveSessions(settings, gate)
    gate.starts.clear()
    opening = asyncio.create_task(sessions.open(CALLER, FOREVER))
    await gate.is_asked()
    if cancelled == "before":
        opening.cancel()
        await asyncio.wait({opening})
    closing = asyncio.create_task(sessions.close())
    await asyncio.sleep(0)
    if cancelled == "after":
        opening.cancel()
    if cancelled == "at its end too":
        opening.cancel()
        closing.cancel()
    gate.starts.set()
    async with asyncio.timeout(20):
        await asyncio.wait({opening, closing})
    await first_is_ended(gate)
    if cancelled == "not at all":
        # Its program may have been there before it was ended.
        problem = opening.exception()
        if problem is None:
            await opening.result().close()
    with pytest.raises(ProblemError, match="going away"):
        await sessions.open(CALLER, FOREVER)


async def test_a_loop_that_ends_while_a_program_starts_leaves_none(
    settings: SandboxSettings, gate: Gate
) -> None:
    gate.starts.clear()

    async def begin() -> None:
        sessions = InteractiveSessions(settings, gate)
        opening = asyncio.create_task(sessions.open(CALLER, FOREVER))
        await gate.is_asked()
        assert not opening.done()  # it is cancelled with the loop

    await asyncio.to_thread(asyncio.run, begin())
    gate.starts.set()
    await first_is_ended(gate)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_program_that_does_not_start_leaves_its_place(
    settings: SandboxSettings, gate: Gate, cancelled: bool
) -> None:
    sessions = InteractiveSessions(settings, gate)
    gate.starts.clear()
    gate.failure = SandboxUnavailableError("no room")
    opening = asyncio.create_task(sessions.open(CALLER, FOREVER))
    await gate.is_asked()
    if cancelled:
        opening.cancel()
        await asyncio.wait({opening})
    gate.starts.set()
    if not cancelled:
        with pytest.raises(ProblemError, match="no room"):
            await opening
        with pytest.raises(ProblemError, match="no room"):
            await sessions.open(CALLER, FOREVER)  # at once
    gate.failure = None
    await is_free(sessions)
    await sessions.close()


async def test_who_is_cancelled_while_it_ends_its_program_frees_the_place(
    settings: SandboxSettings, gate: Gate
) -> None:
    sessions = InteractiveSessions(settings, gate)
    program = await sessions.open(CALLER, FOREVER)
    closing = asyncio.create_task(program.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    await is_free(sessions)
    assert (await program.close())["outcome"]
    await sessions.close()


async def test_who_is_cancelled_twice_while_a_program_reads_nothing_ends_it(
    settings: SandboxSettings, gate: Gate
) -> None:
    sessions = InteractiveSessions(settings, gate)
    program = await sessions.open(CALLER, FOREVER)
    writing = asyncio.create_task(program.write(b"x" * 20_000_000))
    async with asyncio.timeout(20):
        for _ in range(2):
            await asyncio.sleep(0.05)
            writing.cancel()
        await asyncio.wait({writing})
        await program.close()
    await is_free(sessions)
    await sessions.close()


async def test_what_is_asked_while_a_call_goes_on_comes_after_it(
    settings: SandboxSettings, gate: Gate
) -> None:
    sessions = InteractiveSessions(settings, gate)
    program = await sessions.open(CALLER, ECHO)
    reading = asyncio.create_task(program.read(0.2))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait({reading})
    await program.write(b"there\n")
    assert await program.read(20) == b"there\n"
    await program.close()
    await sessions.close()


@pytest.mark.parametrize("patience_s", [0.0, 30.0])
async def test_who_asks_for_a_program_as_the_server_ends_is_told(
    settings: SandboxSettings, gate: Gate, patience_s: float
) -> None:
    sessions = InteractiveSessions(settings, gate)
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    heard: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    services: Any = SimpleNamespace(
        unanswered=Unanswered(),
        settings=SimpleNamespace(max_request_bytes=2**20),
        metrics=SimpleNamespace(socket_received=0, socket_sent=0, problems={"draining": 0}),
    )
    socket = _InteractiveSocket(services, sessions, Context(CALLER, binary=False), heard.get, said.put)
    gate.starts.clear()
    heard.put_nowait({"type": "websocket.receive", "text": json.dumps(FOREVER)})
    serving = asyncio.create_task(socket.serve())
    await gate.is_asked()
    settling = asyncio.create_task(services.unanswered.settle(patience_s))
    if patience_s:
        # Within the grace it is waited for.
        await asyncio.sleep(0)
        assert not settling.done()
        gate.starts.set()
    async with asyncio.timeout(20):
        answer = json.loads((await said.get())["text"])
        await settling
    assert answer == {"ok": {}} if patience_s else answer["error"]["code"] == "draining"
    gate.starts.set()
    heard.put_nowait({"type": "websocket.disconnect"})
    async with asyncio.timeout(20):
        await serving
    await first_is_ended(gate)
    await sessions.close()
