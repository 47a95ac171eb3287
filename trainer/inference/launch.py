"""Inference servers as processes of the run: start, readiness, restarts, and end with the run."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rollgym.clients.process.python_module import python_module
from rollgym.trainer.core.errors import RunError
from rollgym.trainer.inference.keeper import GRACE_S
from rollgym.trainer.inference.server_log import ServerLog
from rollgym.trainer.inference.starts import Starts

_LOOK_EVERY_S = 0.5
_SAY_EVERY_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
"""Until a server that ended by itself is started again: one that cannot start would use up its restarts at once."""


class LaunchError(RunError):
    """An inference server did not start; the message holds what it said last."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that is to be started.

    Attributes:
        command: Its command line.
        environment: Variables that are set for it, beside those that we have.
        url: The address at which it will answer.
        log: File that its output is appended to.
        name: What it is called in messages.
    """

    command: tuple[str, ...]
    url: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "inference server"


@asynccontextmanager
async def launched(
    processes: Sequence[ServerProcess],
    *,
    startup_timeout_s: float,
    restarts: int,
    say: Callable[[str], None],
    status: Callable[[str | None], None],
    gone: Callable[[str], None] = lambda _: None,
    starts: Starts | None = None,
) -> AsyncIterator[list[str]]:
    """Run servers while the context is open, and give their addresses once all of them answer.

    A server that ends by itself is started again, and so is one that does not answer then. None outlives this process,
    however that one ends.

    Args:
        processes: The servers.
        startup_timeout_s: How long one may take until it answers, each time that it is started.
        restarts: How often each is started again.
        say: Called with messages to keep.
        status: Called with messages that replace each other: the progress of the start.
        gone: Called with a server that exits after its last allowed restart.
        starts: Notified of servers that are restarted, and of when they answer.

    Raises:
        LaunchError: If one ends before it answers, or takes too long.
    """
    starts = starts or Starts()
    servers = [_Server(process, startup_timeout_s, say, starts) for process in processes]
    watches: list[asyncio.Task[None]] = []
    try:
        for server in servers:
            await server.start()
            process = server.process
            say(f"starting the {process.name} on {process.url}; what it says: {process.log}")
        waits = [asyncio.ensure_future(server.ready(status)) for server in servers]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            status(None)
        watches = [asyncio.ensure_future(server.restart_if_it_ends(restarts, gone)) for server in servers]
        yield [server.process.url for server in servers]
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in servers))


class _Server:
    """One server and the keeper that holds it."""

    def __init__(
        self, process: ServerProcess, startup_timeout_s: float, say: Callable[[str], None], starts: Starts
    ) -> None:
        self.process = process
        self._log = ServerLog(process.log)
        self._startup_timeout_s = startup_timeout_s
        self._say = say
        self._starts = starts
        self._keeper: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it answers later.

        Raises:
            LaunchError: If its log cannot be written, or the system cannot create another process.
        """
        try:
            with self._log.opened() as output:
                self._keeper = await asyncio.create_subprocess_exec(
                    *python_module("rollgym.trainer.inference.keeper", *self.process.command),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env=os.environ | self.process.environment,
                    # A Ctrl-C goes to all processes of the terminal's group; this one is still needed to end in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"{self._named()} could not be started: {error}") from error

    async def ready(self, status: Callable[[str | None], None] = lambda _: None) -> None:
        """Wait until it answers.

        Raises:
            LaunchError: If it ends first, or takes too long.
        """
        if (why := await self._never_ready(status)) is not None:
            raise LaunchError(f"{why}{self._log.last_words()}")

    async def _never_ready(self, status: Callable[[str | None], None]) -> str | None:
        """Wait until it answers, or return why it does not."""
        assert self._keeper is not None
        ended = asyncio.ensure_future(self._keeper.wait())
        answers = asyncio.ensure_future(self._answers(status))
        try:
            await asyncio.wait(
                {ended, answers}, timeout=self._startup_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                return f"{self._named()} ended with code {ended.result()}"
            if not answers.done():
                return (
                    f"{self._named()} did not answer within {self._startup_timeout_s:g} s "
                    "(inference.launch.startup_timeout_s)"
                )
            answers.result()
            return None
        finally:
            for task in (ended, answers):
                task.cancel()
            await asyncio.gather(ended, answers, return_exceptions=True)

    async def restart_if_it_ends(self, restarts: int, gone: Callable[[str], None]) -> None:
        """Restart the server whenever it exits by itself, up to `restarts` times, ever later; then call `gone`."""
        what, wait_s = await self._ended(), _FIRST_WAIT_S
        for left in range(restarts, 0, -1):
            again = f"it is started again in {wait_s:g} s ({left} times more at most)"
            self._say(f"{what}; {again}{self._log.last_words()}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            what = await self._start_again()
        self._starts.end(self.process.url)
        what = f"{what} once too often{self._log.last_words()}"
        self._say(what)
        gone(what)

    async def _start_again(self) -> str:
        """Start it, wait until it has ended or cannot answer, and return what is to be said of it."""
        try:
            await self.start()
        except LaunchError as error:
            return str(error)
        if (why := await self._never_ready(lambda _: None)) is not None:
            await self.stop()
            return why
        self._starts.end(self.process.url)
        return await self._ended()

    async def _ended(self) -> str:
        """Wait until it has ended, and return what is to be said of it."""
        assert self._keeper is not None
        code = await self._keeper.wait()
        self._starts.begin(self.process.url)
        return f"{self._named()} ended by itself, with code {code}"

    async def stop(self) -> None:
        """End it, and wait until it and its processes have ended."""
        keeper = self._keeper
        if keeper is None or keeper.returncode is not None:
            return
        assert keeper.stdin is not None
        keeper.stdin.close()
        try:
            await asyncio.wait_for(keeper.wait(), 2 * GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                keeper.kill()
            await keeper.wait()

    async def _answers(self, status: Callable[[str | None], None]) -> None:
        began = said = time.monotonic()
        async with httpx.AsyncClient(base_url=self.process.url, timeout=5.0, trust_env=False) as client:
            while True:
                with suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == httpx.codes.OK:
                        break
                now = time.monotonic()
                lines = self._log.lines()
                status(f"{self.process.url} starts, {now - began:.0f} s: {lines[-1] if lines else ''}")
                if now - said >= _SAY_EVERY_S:
                    said = now
                    self._say(f"{self.process.url} has been starting for {now - began:.0f} s")
                await asyncio.sleep(_LOOK_EVERY_S)
        self._say(f"{self.process.url} answers after {time.monotonic() - began:.0f} s")

    def _named(self) -> str:
        return f"the {self.process.name} on {self.process.url}"
