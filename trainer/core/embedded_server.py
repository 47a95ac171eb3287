"""An embedded environment server on loopback, for runs that name no server."""

import asyncio
import logging
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollgym.clients.process.modules import python_module
from rollgym.trainer.core.errors import RoleDiedError, RunError, TrainerError

_READY = re.compile(r"rollgym serving on (http://\S+)")
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 15.0
_ROLE = "environment"
_CHUNK = 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerRestarts:
    """What happens if a server ends by itself.

    Attributes:
        wait_s: Says how long to wait before it is started again; raises if it ended too often.
        lost: Called with that error.
        say: Receives messages for people about restarts.
    """

    wait_s: Callable[[RoleDiedError], float]
    lost: Callable[[Exception], None]
    say: Callable[[str], None]


@asynccontextmanager
async def embedded_server(
    environments: Sequence[str],
    words: Sequence[str] = (),
    restarts: ServerRestarts | None = None,
) -> AsyncIterator[str]:
    """Run `roll-serve` on a free loopback port while the context is open, and give its URL.

    It is a process of its own, so its environments never share an interpreter lock with the training. Clients may ask
    its environments for expert actions: a warm start does.

    Args:
        environments: Environments beside the built-in ones, as `module:Class` or `name=module:Class`.
        words: Further arguments of its command line.
        restarts: Restarts a server that ends by itself, at the same address, as operators do with others; clients
            that wait for it find it there.

    Raises:
        RunError: If the server does not come up; the message holds what it printed.
    """
    arguments = ["--allow-expert", *words]
    for named in environments:
        arguments += ["--env", named]
    server = _Server(arguments)
    keeping: asyncio.Task[None] | None = None
    try:
        url = await server.start()
        if restarts is not None:
            keeping = asyncio.ensure_future(_kept(server, restarts))
        yield url
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await server.stop()


async def _kept(server: "_Server", restarts: ServerRestarts) -> None:
    """Start a server again whenever it ends by itself, until that was too often."""
    died = await server.ended()
    while True:
        try:
            wait_s = restarts.wait_s(died)
        except TrainerError as error:
            restarts.lost(error)
            return
        restarts.say(f"{died}; it is started again in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        try:
            await server.start()
        except RunError as error:
            died = RoleDiedError(_ROLE, str(error))
        else:
            restarts.say("the embedded environment server is back")
            died = await server.ended()


class _Server:
    """The process of a server, which may be started again at the address that it had.

    Args:
        arguments: Its command line, without its address.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._port = "0"
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start it, and return its address once it answers.

        Raises:
            RunError: If it does not come up.
        """
        # The server's standard input ends with this process, however it ends: a killed run leaves no server behind.
        address = ["--host", "127.0.0.1", "--port", self._port, "--stop-at-end-of-input"]
        process = self._process = await asyncio.create_subprocess_exec(
            *python_module("rollgym.env_server", *address, *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A Ctrl-C goes to all processes of the terminal's group; this one is still needed to end in order.
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            url = await _wait_until_ready(process.stdout)
        except BaseException:
            await self.stop()
            raise
        self._port = url.rpartition(":")[2]
        self._reading = asyncio.ensure_future(_read_on(process.stdout))
        return url

    async def ended(self) -> RoleDiedError:
        """Wait until it ends by itself, and return a description of its end."""
        assert self._process is not None
        code = await self._process.wait()
        what = f"the embedded environment server ended by itself, with code {code}"
        return RoleDiedError(_ROLE, what, killed=code == -signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the server, and wait for its process to exit."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if process.returncode:
            _log.error("the embedded environment server ended with code %d", process.returncode)
        if self._reading is not None:
            self._reading.cancel()


async def _read_on(output: asyncio.StreamReader) -> None:
    """Read on, so that the server never blocks on a full pipe."""
    # Not by lines: one that is longer than a reader keeps would end the reading.
    while await output.read(_CHUNK):
        pass


async def _wait_until_ready(output: asyncio.StreamReader) -> str:
    printed: list[str] = []
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            async for line in output:
                text = line.decode(errors="replace").rstrip()
                printed.append(text)
                if match := _READY.search(text):
                    return match.group(1)
    except TimeoutError:
        printed.append(f"not ready within {_START_TIMEOUT_S:g} s")
    # What it says of a mistake goes to standard error, which is ours, too.
    said = "; ".join(printed) or "why, it said above"
    raise RunError(f"the embedded environment server did not start: {said}")
