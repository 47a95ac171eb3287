"""Several I/O processes on one port, and the process that keeps them alive (`--processes`)."""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rollgym.env_server.access.quotas import start_quota_counters
from rollgym.env_server.common.io_process import ProcessRank
from rollgym.env_server.common.logs import configure_logs
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.env_server.process.server import bind, reserve, run_process, url_of

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from rollgym.env_server.process.supervisor import main; sys.exit(main())"
)
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 10.0
# A process that has served this long did not die of its start-up settings.
_SETTLED_S = 30.0
# Beyond the grace for running operations, for closing environments and sockets.
_STOP_MARGIN_S = 20.0

# The interval of liveness checks; a thread of the process answers, even if its event loop is blocked.
_SIGN_S = 1.0
# After so many unanswered signs the process is reported as hanging, then killed; its sessions resume from their
# journals.
_HANGS_AFTER = 3
_KILLED_AFTER = 10

_LOCK = "supervisor.lock"

_SIGNS = 4096
_READY_LINE = b"ready\n"
"""The line that an I/O process writes to its standard output once it serves."""

_log = logging.getLogger(__name__)


def supervise(settings: ServerSettings, announce: Callable[[str], None]) -> int:
    """Run `settings.processes` I/O processes until SIGTERM or SIGINT.

    Args:
        settings: The operator's settings.
        announce: Called with the server's URL once all processes serve.

    Returns:
        The exit code.

    Raises:
        ConfigurationError: If the address cannot be used.
    """
    configure_logs(settings.log_level, settings.log_format, "supervisor")
    with contextlib.ExitStack() as stack:
        # Bound, but not listening: it gets no connections, and keeps the port while a process is away.
        reserved = stack.enter_context(reserve(settings.host, settings.port, shared=True))
        directory = settings.state_dir
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollgym-")))
        stack.enter_context(_alone_in(directory))
        start_quota_counters(directory)
        given = settings.model_copy(update={"port": reserved.getsockname()[1]})
        supervisor = Supervisor(given, directory, lambda: announce(url_of(settings.host, reserved)))
        return asyncio.run(supervisor.run())


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep other servers out of a directory, before anything is touched there that processes which run share.

    Raises:
        ConfigurationError: One is there already, or it cannot be used.
    """
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot use {directory}: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigurationError(f"another server uses {directory}") from None
    finally:
        os.close(lock)


class Supervisor:
    """Starts I/O processes, restarts those that die, and ends all.

    Args:
        settings: The settings that the processes receive; the port is the real one.
        directory: The directory of their Unix sockets.
        announce: Called once all of them serve.
    """

    def __init__(self, settings: ServerSettings, directory: Path, announce: Callable[[], None]) -> None:
        self._settings = settings
        self._directory = directory
        self._announce = announce
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._restarts = [-1] * settings.processes
        self._stopping = asyncio.Event()
        self._serving: set[int] = set()
        self._exit_code = 0

    async def run(self) -> int:
        """Keep the processes alive until a stop signal; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        if self._settings.token_file is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload)
        await asyncio.gather(*(self._keep(index) for index in range(self._settings.processes)))
        return self._exit_code

    def _stop(self) -> None:
        """Send all processes SIGTERM: the first one lets them drain, a second one makes them give up."""
        self._stopping.set()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()

    def _reload(self) -> None:
        """Let all processes read the token file again."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGHUP)

    async def _keep(self, index: int) -> None:
        """Keep one process alive: restart it whenever it ends."""
        loop = asyncio.get_running_loop()
        backoff = 0.0
        while not self._stopping.is_set():
            started = loop.time()
            process = await self._start(index)
            served = await self._await_ready(index, process)
            watching = loop.create_task(self._watch(index, process)) if served else None
            code = await self._await_end(process)
            if watching is not None:
                watching.cancel()
            del self._processes[index]
            if self._stopping.is_set():
                return
            if not served and len(self._serving) < self._settings.processes:
                # The server as a whole has not begun to serve: the operator must see the error.
                self._exit_code = code if code > 0 else 1
                self._stop()
                return
            if loop.time() - started > _SETTLED_S:
                backoff = 0.0
            _log.error("I/O process %d ended with code %d; next start in %g s", index, code, backoff)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(_MAX_BACKOFF_S, max(_FIRST_BACKOFF_S, 2 * backoff))

    async def _start(self, index: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BOOT, json.dumps(sys.path)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C reaches the supervisor alone, which then signals each process once.
            start_new_session=True,
        )
        self._processes[index] = process
        self._restarts[index] += 1
        if self._stopping.is_set():
            process.terminate()
        assert process.stdin is not None
        orders = {
            "settings": self._settings.model_dump(mode="json"),
            "index": index,
            "restarts": self._restarts[index],
            "directory": os.fspath(self._directory),
        }
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(orders).encode() + b"\n")
            await process.stdin.drain()
        return process

    async def _await_ready(self, index: int, process: asyncio.subprocess.Process) -> bool:
        """Wait until a process serves; whether it did."""
        assert process.stdout is not None
        if await process.stdout.readline() != _READY_LINE:
            return False
        if index not in self._serving:
            self._serving.add(index)
            if len(self._serving) == self._settings.processes:
                self._announce()
        return True

    async def _watch(self, index: int, process: asyncio.subprocess.Process) -> None:
        """Kill a process that fails the liveness checks: a stopped one would hold its connections for ever."""
        assert process.stdin is not None
        assert process.stdout is not None
        silent = 0
        # Signs are counted and not seconds: a machine that was suspended has missed none.
        answer = asyncio.ensure_future(process.stdout.read(_SIGNS))
        try:
            while not self._stopping.is_set():
                await asyncio.sleep(_SIGN_S)
                if answer.done():
                    if not answer.result():
                        return
                    silent = 0
                    answer = asyncio.ensure_future(process.stdout.read(_SIGNS))
                silent += 1
                if silent == _HANGS_AFTER:
                    _log.error("I/O process %d gives no sign of life: is it stopped (SIGSTOP)?", index)
                if silent > _KILLED_AFTER:
                    _log.error("I/O process %d is killed, and started again: it gave no sign of life", index)
                    process.kill()
                    return
                process.stdin.write(b"?")
        except ConnectionError:
            return
        finally:
            answer.cancel()

    async def _await_end(self, process: asyncio.subprocess.Process) -> int:
        """Wait for a process's end; one that does not stop in time is killed."""
        ending = asyncio.ensure_future(process.wait())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({ending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ending.done():
            grace_s = self._settings.drain_grace_s + _STOP_MARGIN_S
            await asyncio.wait({ending}, timeout=grace_s)
            if not ending.done():
                _log.error("I/O process %d did not stop in %g s", process.pid, grace_s)
                self._exit_code = 1
                process.kill()
        return await ending


def main() -> int:
    """Run an I/O process, with settings from standard input, until its supervisor ends it; return the exit code."""
    # Until the token file is read, there is nothing to read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    orders = json.loads(sys.stdin.buffer.readline())
    settings = ServerSettings.model_validate(orders["settings"])
    rank = ProcessRank(orders["index"], settings.processes, Path(orders["directory"]), orders["restarts"])
    # Standard output is the channel to the supervisor; all other output goes to the log.
    supervisor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_supervisor, args=(supervisor,), name="supervisor", daemon=True).start()
    try:
        listening = bind(settings.host, settings.port, shared=True)
        return run_process(settings, rank, listening, lambda: _tell(supervisor))
    except ConfigurationError as error:
        sys.stderr.write(f"roll-serve: {error}\n")
        return 2


def _tell(supervisor: int) -> None:
    os.write(supervisor, _READY_LINE)


def _end_with_supervisor(supervisor: int) -> None:
    """Give signs of life, and drain when the other end of standard input is closed.

    Nothing but the supervisor's end does that.
    """
    # Not through `sys.stdin`: its lock, held here for ever, would be in the way when the interpreter ends.
    while os.read(0, _SIGNS):
        # The supervisor that has just ended reads no answer.
        with contextlib.suppress(BrokenPipeError):
            os.write(supervisor, b"!")
    os.kill(os.getpid(), signal.SIGTERM)
