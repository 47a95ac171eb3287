"""An environment server of one's own, on loopback, for runs that name none."""

import asyncio
import logging
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from trainer.core.errors import RunError

_READY = re.compile(r"rollgym serving on (http://\S+)")
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0

_log = logging.getLogger(__name__)


@asynccontextmanager
async def embedded_server(
    environments: Sequence[str],
    on_end: Callable[[Exception], None] | None = None,
    words: Sequence[str] = (),
) -> AsyncIterator[str]:
    """Run `roll-serve` on a free loopback port while the context is open, and give its URL.

    It is a process of its own, so its environments never share an interpreter lock with the training. Clients may ask
    its environments for expert actions: a warm start does.

    Args:
        environments: What it serves beside the built-in ones, as `module:Class` or `name=module:Class`.
        on_end: Told where the server ends by itself: nobody need wait for it to come back.
        words: Further words of its command line.

    Raises:
        RunError: If the server does not come up; the message holds what it printed.
    """
    # The server's standard input ends with this process, however it ends: a killed run leaves no server behind.
    arguments = ["--host", "127.0.0.1", "--port", "0", "--stop-at-end-of-input", "--allow-expert", *words]
    for named in environments:
        arguments += ["--env", named]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "env_server",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # A Ctrl-C goes to all processes of the terminal's group; this one is still needed to end in order.
        start_new_session=True,
    )
    assert process.stdout is not None
    watch: asyncio.Task[None] | None = None
    stopping = asyncio.Event()
    try:
        url = await _wait_until_ready(process.stdout)
        watch = asyncio.get_running_loop().create_task(_watch(process, stopping, on_end))
        yield url
    finally:
        stopping.set()
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        if process.returncode:
            _log.error("the embedded environment server ended with code %d", process.returncode)
        if watch is not None:
            watch.cancel()


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
        printed.append(f"not ready within {_START_TIMEOUT_S} s")
    # What it says of a mistake goes to standard error, which is ours, too.
    said = "; ".join(printed) or "why, it said above"
    raise RunError(f"the embedded environment server did not start: {said}")


async def _watch(
    process: asyncio.subprocess.Process, stopping: asyncio.Event, on_end: Callable[[Exception], None] | None
) -> None:
    """Read on, so that the server never blocks on a full pipe, and tell if it ends before it is stopped."""
    assert process.stdout is not None
    async for _ in process.stdout:
        pass
    code = await process.wait()
    if on_end is not None and not stopping.is_set():
        on_end(ConnectionError(f"the embedded environment server ended by itself, with code {code}"))
