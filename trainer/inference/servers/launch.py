"""Inference servers as processes of the run: command lines, ports, start, readiness, restarts, and end with the run."""

import asyncio
import importlib.util
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import BinaryIO

import httpx

from rollgym.clients.process.modules import python_module
from rollgym.extras import install_line_of
from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.core.errors import ConfigError, RunError
from rollgym.trainer.core.ports import free_ports, hold
from rollgym.trainer.inference.servers.dialect import ServedModel, server_program
from rollgym.trainer.inference.servers.parent_guard import GRACE_S

_LAST_LINES = 20
_LINE_WIDTH = 300
_READ_AT_END = 2**16
"""Bytes of what a server said that are looked through: vLLM says why its engine ended far above its last lines."""
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): \S")
_UNKNOWN_SWITCH = re.compile(r"unrecognized arguments|no such option", re.I)
_SHORT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|memory utilization|KV cache memory|mem-fraction-static", re.I
)
"""What vLLM, SGLang and torch say where a device's memory does not suffice."""


class ServerLog:
    """What one server says, appended to a file over all its starts.

    Args:
        path: The file.
        oldest: Name and oldest release of what knows all switches of its command line; empty if that is not known.
    """

    def __init__(self, path: Path, oldest: str = "") -> None:
        self._path = path
        self._oldest = oldest
        self._begin = 0

    def opened(self) -> BinaryIO:
        """Open the file for a server that is about to start; what others have said before is read no more."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        output = self._path.open("ab")
        self._begin = output.tell()
        return output

    def lines(self) -> list[str]:
        """What it said last since it was started, by lines; none if it can no longer be read."""
        try:
            with self._path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._begin, size - _READ_AT_END))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line[:_LINE_WIDTH] for line in text.splitlines() if line.strip()]

    def last_words(self) -> str:
        """The last lines as the rest of a sentence, with what can be done about them; empty without any lines."""
        told = self.lines()
        before, lines = told[:-_LAST_LINES], told[-_LAST_LINES:]
        if not lines:
            return ""
        said = "; the last lines of " + "\n  ".join([f"{self._path}:", *lines])
        # An engine is a process of its own, whose end the last lines only tell of.
        causes = [line for line in before if _EXCEPTION.search(line)][-1:]
        if causes:
            said += f"\nSaid before: {causes[0]}"
        if self._oldest and any(map(_UNKNOWN_SWITCH.search, lines)):
            said += (
                f"\nIt is of a release that does not know a switch: runs start {self._oldest} or newer; start an older "
                "one yourself and give its address by inference.urls"
            )
        if any(map(_SHORT_OF_MEMORY.search, [*lines, *causes])):
            said += (
                "\nMemory does not suffice: look for what else is on the device, set inference.launch.memory_fraction "
                "or tensor_parallel, or lower model.max_length"
            )
        return said


class RestartingServers:
    """Servers that have exited and are being restarted.

    Attributes:
        changed: Called when one begins to start, and when it answers or never will.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._under_way: set[str] = set()
        self._last_end = -inf

    def begin(self, url: str) -> None:
        """A server has ended, and is started again."""
        self._under_way.add(url)
        self.changed()

    def end(self, url: str) -> None:
        """It answers, or is not started any more."""
        self._under_way.discard(url)
        self._last_end = asyncio.get_running_loop().time()
        self.changed()

    def deadline(self, deadline: float, patience_s: float) -> float | None:
        """Return until when servers are waited for, by the clock of the event loop; None while one starts.

        Args:
            deadline: Until when, had none been started.
            patience_s: How long they are waited for once one has started: it is sent its weights then.
        """
        return None if self._under_way else max(deadline, self._last_end + patience_s)


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
        oldest: Name and oldest release of what knows all switches of its command line; empty if that is not known.
    """

    command: tuple[str, ...]
    url: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "inference server"
    oldest: str = ""


@asynccontextmanager
async def launched(
    processes: Sequence[ServerProcess],
    *,
    startup_timeout_s: float,
    restarts: int,
    say: Callable[[str], None],
    status: Callable[[str | None], None],
    gone: Callable[[str], None] = lambda _: None,
    starts: RestartingServers | None = None,
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
    starts = starts or RestartingServers()
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
    """One server and the guard that holds it."""

    def __init__(
        self,
        process: ServerProcess,
        startup_timeout_s: float,
        say: Callable[[str], None],
        starts: RestartingServers,
    ) -> None:
        self.process = process
        self._log = ServerLog(process.log, process.oldest)
        self._startup_timeout_s = startup_timeout_s
        self._say = say
        self._starts = starts
        self._guard: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process; it answers later.

        Raises:
            LaunchError: If its log cannot be written, or the system cannot create another process.
        """
        try:
            with self._log.opened() as output:
                self._guard = await asyncio.create_subprocess_exec(
                    *python_module("rollgym.trainer.inference.servers.parent_guard", *self.process.command),
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
        assert self._guard is not None
        ended = asyncio.ensure_future(self._guard.wait())
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
        assert self._guard is not None
        code = await self._guard.wait()
        self._starts.begin(self.process.url)
        return f"{self._named()} ended by itself, with code {code}"

    async def stop(self) -> None:
        """End it, and wait until it and its processes have ended."""
        guard = self._guard
        if guard is None or guard.returncode is not None:
            return
        assert guard.stdin is not None
        guard.stdin.close()
        try:
            await asyncio.wait_for(guard.wait(), 2 * GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()

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


def require_program(inference: InferenceSettings, launch: LaunchSettings) -> None:
    """Look whether the servers' program is there.

    Raises:
        ConfigError: If it is not; the message says how to get it.
    """
    if launch.command:
        if shutil.which(launch.command[0]) is None:
            raise ConfigError(f"inference.launch.command: there is no program {launch.command[0]}")
    elif importlib.util.find_spec(inference.kind) is None:
        raise ConfigError(
            f"inference.launch: {inference.kind} is not installed beside the trainer: "
            f"{install_line_of(inference.kind)}, name the program of another environment by inference.launch.command, "
            "or name servers that run by inference.urls"
        )


def choose_ports(launch: LaunchSettings) -> list[int]:
    """Return the servers' ports: those that the settings name, or free ones.

    A server takes its port many seconds later, once it has imported its libraries.

    Raises:
        ConfigError: If one that they name is taken.
    """
    host = launch.host
    if launch.port is None:
        try:
            return free_ports(host, launch.count)
        except OSError as error:
            raise ConfigError(
                f"inference.launch: cannot listen on {host}: {error.strerror or error}; set inference.launch.host to "
                "an address of this machine"
            ) from error
    with ExitStack() as held:
        return [_named(held, host, launch.port + number) for number in range(launch.count)]


def _named(held: ExitStack, host: str, port: int) -> int:
    try:
        return hold(held, host, port)
    except OSError as error:
        raise ConfigError(
            f"inference.launch: cannot listen on {host}:{port}: {error.strerror or error}; leave inference.launch.port "
            "out, and free ones are taken"
        ) from error


def server_processes(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, ports: Sequence[int], logs: Path
) -> list[ServerProcess]:
    """Return the servers that settings ask for. No I/O.

    Args:
        inference: Which servers, and what is asked of them.
        launch: How they are started.
        model: What they serve.
        ports: One for each.
        logs: Folder of what they say.

    Raises:
        ConfigError: If a server of this kind takes no adapters of such a rank.
    """
    program, kind = server_program(inference.kind), inference.what
    oldest = f"{kind.title} {kind.launched_from}" if kind.launched_from else ""
    processes = []
    for number, port in enumerate(ports):
        words, variables = program.command(inference, launch, model, port)
        variables |= launch.environment
        if launch.devices:
            variables[launch.devices_variable] = launch.devices[number]
        log = logs / f"{inference.kind}-{number}.log"
        command = (*words, *launch.arguments)
        processes.append(ServerProcess(command, _url(launch.host, port), log, variables, oldest=oldest))
    return processes


def _url(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
