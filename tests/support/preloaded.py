"""Our commands in processes of their own that are forked from one which has imported all that they need.

Torch and transformers take seconds of CPU to import, a server's modules most of one, and the tests start `roll-train`
some seventy times, ranks as often and `roll-serve` some hundreds. A process that is forked has its own memory, files,
signals and end like any other; only the imports are not made again. What is forked has the hash seed of the others, so
that what must be equal to one of these is better started afresh, as is what depends on variables that are read while
modules are imported (`can_be_forked`).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import io
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

ROOT = Path(__file__).parents[2]
# Read when the command runs, and not while modules are imported.
# Ray, which leaves some of these in a test's process, is imported only by who asks for it.
_READ_LATE = (
    "ROLLGYM_TOKEN",
    "PYTEST_CURRENT_TEST",
    "PYTEST_XDIST_WORKER",
    "PYTHONUNBUFFERED",
    "PYTHONBREAKPOINT",
)
_READ_LATE_PREFIX = "RAY_"
# Left in a test's process by libraries that it imports, to be read by themselves: no test sets them.
_LEFT_BEHIND = (
    "DS_BUILD_OPS",
    "PYGAME_HIDE_SUPPORT_PROMPT",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "SDL_AUDIODRIVER",
    "TORCHINDUCTOR_CACHE_DIR",
)


class Command(NamedTuple):
    """A command that can be forked.

    Attributes:
        name: What it is called.
        main: The module whose function `main` it is.
        beside: What it imports only once it runs; what is not installed is passed over.
        variables: Those that it is always started with, beside the test's own.
        read_late: Those that it reads only once it runs.
    """

    name: str
    main: str
    beside: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    read_late: tuple[str, ...] = ()


TRAIN = Command(
    "roll-train",
    "rollgym.trainer.cli",
    ("rollgym.trainer.run.train", "rollgym.trainer.run.trained_policy", "rollgym.trainer.run.rollout"),
)
SERVE = Command("roll-serve", "rollgym.env_server.cli", ("tests.support.every_environment",))
RANK = Command(
    "rank",
    "rollgym.trainer.backends.rank",
    ("tests.support.sharded_models", "deepspeed", "rollgym.trainer.backends.megatron.backend"),
    (("OMP_NUM_THREADS", "1"),),
    # Modules are found here where the test finds them.
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME", "PYTHONPATH"),
)
_COMMANDS = {each.name: each for each in (TRAIN, SERVE, RANK)}


class Forked:
    """A forked process: what tests use of `subprocess.Popen`, with text pipes.

    Args:
        address: Of the process to fork from.
        arguments: The command's.
        environment: All of its variables.
        stdin: `PIPE`, or `DEVNULL`.
        stdout: `PIPE`, or a descriptor to write to.
        stderr: `PIPE`, `STDOUT`, a descriptor to write to, or None: they go where those of this process go.
        passed: A descriptor that it has as number 3.
        start_new_session: Whether a key that interrupts this process leaves it alone.
        main: The module whose function `main` it is, where that is another than the command's.
    """

    def __init__(
        self,
        address: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.PIPE,
        stderr: int | None = subprocess.STDOUT,
        passed: int | None = None,
        start_new_session: bool = False,
        main: str | None = None,
    ) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._reading = threading.Lock()
        self.stdin: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self._told = b""
        given = os.open(os.devnull, os.O_RDONLY)
        if stdin == subprocess.PIPE:
            os.close(given)
            given, writable = os.pipe()
            self.stdin = open(writable, "w", encoding="utf-8")  # noqa: SIM115 - closed with the process
        self.stdout: IO[str] | None = None
        if stdout == subprocess.PIPE:
            self.stdout, output = _read_end()
        else:
            output = os.dup(stdout)
        theirs = [given, output, output]
        if stderr == subprocess.PIPE:
            self.stderr, theirs[2] = _read_end()
        elif stderr != subprocess.STDOUT:
            theirs[2] = os.dup(2 if stderr is None else stderr)
        if passed is not None:
            theirs.append(os.dup(passed))
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(address)
        wishes = {
            "arguments": self.args,
            "environment": dict(environment),
            "start_new_session": start_new_session,
            "main": main,
        }
        order = json.dumps(wishes).encode() + b"\n"
        try:
            sent = socket.send_fds(self._socket, [order], theirs)
            self._socket.sendall(order[sent:])
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)
        self.pid = int(self._line(30.0))

    def poll(self) -> int | None:
        """The exit code, if it has ended; the number of the signal that ended it, negated."""
        # A thread that waits for its end takes the code.
        if self.returncode is None and self._reading.acquire(blocking=False):
            try:
                self._take_code(0.0)
            except TimeoutError:
                pass
            finally:
                self._reading.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; gives the exit code."""
        try:
            with self._reading:
                return self._take_code(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and for that of all who write to its output; gives what it wrote."""
        if self.stdin is not None:
            self.stdin.close()
        found = ["", ""]
        began = time.monotonic()

        def read(place: int, pipe: IO[str]) -> None:
            found[place] = pipe.read()

        pipes = [each for each in (self.stdout, self.stderr) if each is not None]
        reading = [threading.Thread(target=read, args=each, daemon=True) for each in enumerate(pipes)]
        for each in reading:
            each.start()
        for each in reading:
            each.join(None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))
            if each.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began)))
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # Its parent may have taken its exit code a moment ago, and not told of it yet.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()
        self._socket.close()

    def _take_code(self, timeout: float | None) -> int:
        """Read the exit code, unless it has been read; by one thread at a time."""
        if self.returncode is None:
            self.returncode = int(self._line(timeout))
        return self.returncode

    def _line(self, timeout: float | None) -> bytes:
        """The next line that is told of it."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._told:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                raise TimeoutError
            told = self._socket.recv(4096)
            if not told:
                raise EOFError("the process that it was forked from has ended")
            self._told += told
        line, _, self._told = self._told.partition(b"\n")
        return line


def _read_end() -> tuple[IO[str], int]:
    """A pipe: what is read from it as text, and the descriptor that is written to."""
    readable, writable = os.pipe()
    return open(readable, encoding="utf-8", errors="replace"), writable


class _Source(NamedTuple):
    """What to fork from.

    Attributes:
        address: Where it takes orders.
        variables: Its environment.
        kept_by: What it ends with, once it has ended in all test processes.
    """

    address: str
    variables: Mapping[str, str]
    kept_by: object


@functools.cache
def _preloaded(command: Command) -> _Source:
    """The process to fork from; all workers of a test run have the same one, which the first of them starts."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        return _started(command, tempfile.mkdtemp(prefix="rollgym-tests-"))
    folder = Path(tempfile.gettempdir(), f"rollgym-tests-{run}-{command.name}")
    folder.mkdir(mode=0o700, exist_ok=True)
    with _locked(folder):
        folder.mkdir(mode=0o700, exist_ok=True)
        return _joined(str(folder)) or _started(command, str(folder))


@contextlib.contextmanager
def _locked(folder: Path, waiting: bool = True) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waiting else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _started(command: Command, folder: str) -> _Source:
    environment = os.environ | dict(command.variables)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.preloaded", command.name, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert process.stdout is not None
    # Libraries may say something first.
    assert "ready\n" in process.stdout, f"{command.name} cannot be imported"
    return _Source(f"{folder}/orders", environment, process)


def _joined(folder: str) -> _Source | None:
    """That which another worker has started, if it is still there."""
    keeper = socket.socket(socket.AF_UNIX)
    try:
        keeper.connect(f"{folder}/keepers")
        environment = json.loads(keeper.makefile().readline())
    except (OSError, ValueError):  # it has not been started, or it ends
        keeper.close()
        return None
    return _Source(f"{folder}/orders", environment, keeper)


def can_be_forked(command: Command, environment: Mapping[str, str]) -> bool:
    """Whether nothing that modules may have read when they were imported is different."""
    preloaded = _preloaded(command).variables
    names = (preloaded.keys() | environment.keys()) - {*_READ_LATE, *_LEFT_BEHIND, *command.read_late}
    return all(
        preloaded.get(name) == environment.get(name)
        for name in names
        if not name.startswith(_READ_LATE_PREFIX)
    )


def fork(command: Command, arguments: Sequence[str], environment: Mapping[str, str], **wishes: Any) -> Forked:
    """Run a command with these arguments, and with pipes, a session and a module as `Forked` has them."""
    return Forked(_preloaded(command).address, arguments, environment, **wishes)


# -- in the process to fork from ---------------------------------------------------------------------------------------


def _serve(command: Command, folder: str) -> Callable[[], int]:
    """Fork a process for each order until nobody keeps this one; returns in the forked ones: what they are to do."""
    gc.disable()
    for name in command.beside:
        with contextlib.suppress(ModuleNotFoundError):
            import_module(name)
    import_module(command.main)
    # What is there is shared with all that are forked; a collection would copy it into each.
    gc.collect()
    gc.freeze()
    gc.enable()
    # Nobody waits for those that wait for the commands.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    orders, keepers = _listening(f"{folder}/orders"), _listening(f"{folder}/keepers")
    # Standard input is held by who started this process.
    kept_by: set[int | socket.socket] = {0}
    print("ready", flush=True)
    while True:
        readable = select.select([orders, keepers, *kept_by], [], [], None if kept_by else 1.0)[0]
        kept_by.difference_update(readable)
        if keepers in readable:
            keeper, _ = keepers.accept()
            with contextlib.suppress(BrokenPipeError):
                keeper.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
            kept_by.add(keeper)
        if not kept_by:
            # Whoever holds the lock is about to keep this one.
            with contextlib.suppress(BlockingIOError), _locked(Path(folder), waiting=False):
                shutil.rmtree(folder)
                os._exit(0)
        if orders in readable:
            connection, _ = orders.accept()
            if os.fork():
                connection.close()
                continue
            for each in (orders, keepers, *kept_by):
                if isinstance(each, socket.socket):
                    each.close()
            return _ordered(command, connection)


def _listening(address: str) -> socket.socket:
    # Left by one that was killed; who starts this one holds the lock.
    Path(address).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    return listening


def _ordered(command: Command, connection: socket.socket) -> Callable[[], int]:
    """Fork the command, and tell its process id and its exit code; returns in the command's process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    content, streams, _, _ = socket.recv_fds(connection, 65536, 4)
    while not content.endswith(b"\n"):
        content += connection.recv(65536)
    order = json.loads(content)
    forked = os.fork()
    if forked:
        for descriptor in streams:
            os.close(descriptor)
        with contextlib.suppress(BrokenPipeError):
            connection.sendall(b"%d\n" % forked)
            code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
            connection.sendall(b"%d\n" % code)
        os._exit(0)
    connection.close()
    return functools.partial(_run, command, order, streams)


def _run(command: Command, order: dict[str, Any], streams: Sequence[int]) -> int:
    for target, source in enumerate(streams):
        os.dup2(source, target)
    for descriptor in streams:
        if descriptor >= len(streams):
            os.close(descriptor)
    if order["start_new_session"]:
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(os.fdopen(number, "wb", 0, closefd=False), encoding="utf-8", write_through=True)
        for number in (1, 2)
    )
    sys.argv = [command.name, *order["arguments"]]
    return int(import_module(order["main"] or command.main).main())


if __name__ == "__main__":
    sys.exit(_serve(_COMMANDS[sys.argv[1]], sys.argv[2])())
