"""One warm container: made, spoken to, taken away. Its first process gets our files as text: images need nothing."""

import contextlib
import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import docker
from docker.models.containers import Container as DockerContainer

from rollgym.sandbox.containers.engine import ENGINE_ERRORS, ContainerShape, container_options, run_limits
from rollgym.sandbox.containers.inside.frames import HEADER, INPUT, READY, RESULT, RUN, STOP, frame
from rollgym.sandbox.core.base import Guarantees, Outcome, RunResult
from rollgym.sandbox.core.languages import ENVIRONMENT, Toolchain
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.core.outcomes import Facts, Stop, classify
from rollgym.sandbox.core.uploads import too_large

_DOCKER_HEADER = struct.Struct(">BxxxI")
_STANDARD_OUTPUT = 1
_CHUNK = 256 * 1024
_COMPLAINT_BYTES = 2000
# The bound of received but unread bytes.
_KEPT_BYTES = 4 * 1024 * 1024
_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ConversationEndedError(Exception):
    """The process in the container is gone; the text is the end of its standard error."""


class ContainerConversation:
    """The host's end of it. One thread at a time may use it.

    Args:
        attached: The socket that Docker has given for the container's three streams.
    """

    def __init__(self, attached: socket.socket) -> None:
        self._socket = attached
        attached.setblocking(False)
        self._raw = bytearray()
        self._received = bytearray()
        self._complaint = b""
        self._ended = False

    def send(
        self, kind: int, payload: bytes, *parts: bytes, deadline: float, held_until: float = 0.0
    ) -> None:
        """Send a frame and what follows it.

        Incoming bytes are read at the same time, to avoid a deadlock: the other side may block in a write until we
        read.

        Args:
            kind: The kind of the frame.
            payload: Its content.
            parts: Raw bytes that follow it.
            deadline: When all of it must have been sent.
            held_until: Until then, incoming bytes are read only up to the buffer's bound; a peer that writes but never
                reads gets back-pressure.

        Raises:
            TimeoutError: If it could not be sent by the deadline.
            ConversationEndedError: If the container's process has ended.
        """
        for part in (frame(kind, payload), *parts):
            view = memoryview(part)
            while view:
                if self.held >= _KEPT_BYTES and not self._can_write(min(deadline, held_until)):
                    if time.monotonic() >= deadline:
                        raise TimeoutError("the process in the container takes nothing more")
                    self._wait(deadline, write=True)
                elif self.held < _KEPT_BYTES:
                    self._wait(deadline, write=True)
                try:
                    view = view[self._socket.send(view[:_CHUNK]) :]
                except _NOT_YET:
                    continue
                except OSError as error:
                    raise self._end() from error

    def frame(self, deadline: float) -> tuple[int, bytes]:
        """Wait for the next frame and return it.

        Raises:
            TimeoutError: If it does not arrive in time.
            ConversationEndedError: If the container's process has ended.
        """
        kind, size = HEADER.unpack(self.exactly(HEADER.size, deadline))
        return kind, self.exactly(size, deadline)

    def exactly(self, size: int, deadline: float) -> bytes:
        """Wait for the next bytes and return them.

        Raises:
            TimeoutError: If they do not arrive in time.
            ConversationEndedError: If the container's process has ended.
        """
        while len(self._received) < size:
            if self._ended:
                raise self._end()
            self._wait(deadline)
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def has_frame(self, deadline: float) -> bool:
        """Whether a frame arrives before the deadline; True for a broken connection, whose read then fails."""
        with contextlib.suppress(TimeoutError):
            while not (self._ended or self._has_whole_frame()):
                self._wait(deadline)
        return self._ended or self._has_whole_frame()

    def hang_up(self) -> None:
        """Close the connection from any thread; waiting calls then raise `ConversationEndedError`."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket to the container."""
        self._socket.close()

    def _has_whole_frame(self) -> bool:
        if len(self._received) < HEADER.size:
            return False
        _, size = HEADER.unpack_from(self._received)
        return len(self._received) >= HEADER.size + int(size)

    def _end(self) -> ConversationEndedError:
        lines = self._complaint.decode(errors="replace").strip().splitlines()
        return ConversationEndedError(lines[-1] if lines else "the container has ended")

    @property
    def held(self) -> int:
        """The number of received but unread bytes."""
        return len(self._raw) + len(self._received)

    def _can_write(self, deadline: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def _wait(self, deadline: float, *, write: bool = False) -> None:
        """Wait until the socket is readable, or writable; read the available bytes."""
        poller = select.poll()
        wanted = (0 if self._ended else select.POLLIN) | (select.POLLOUT if write else 0)
        poller.register(self._socket, wanted)
        events = poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not events:
            raise TimeoutError("the process in the container does not answer")
        if events[0][1] & ~select.POLLOUT and not self._ended:
            self._take()

    def _take(self) -> None:
        try:
            # TLS may hold more bytes than the socket shows.
            while data := self._socket.recv(_CHUNK):
                self._raw += data
                if len(self._raw) > _KEPT_BYTES and not getattr(self._socket, "pending", int)():
                    break
            else:
                self._ended = True
        except _NOT_YET:
            pass
        except OSError:
            self._ended = True
        position = 0
        while len(self._raw) - position >= _DOCKER_HEADER.size:
            stream, size = _DOCKER_HEADER.unpack_from(self._raw, position)
            begin = position + _DOCKER_HEADER.size
            if len(self._raw) < begin + size:
                break
            if stream == _STANDARD_OUTPUT:
                self._received += self._raw[begin : begin + size]
            else:
                self._complaint = (self._complaint + self._raw[begin : begin + size])[-_COMPLAINT_BYTES:]
            position = begin + size
        del self._raw[:position]


_PACKAGE = "rollgym.sandbox.containers.inside"
# In the order in which they import each other.
_MODULES = ("frames", "files", "run", "main")
_START = """
import json, sys, types
for name, source in json.loads(sources):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), vars(module))
sys.modules[name].main()
"""


def first_process() -> str:
    """Return the program of the first process, for `python3 -c`."""
    parents = [_PACKAGE.rsplit(".", depth)[0] for depth in (3, 2, 1)]
    sources = [(name, "") for name in (*parents, _PACKAGE)]
    for name in _MODULES:
        text = resources.files(_PACKAGE).joinpath(f"{name}.py").read_text("utf-8")
        sources.append((f"{_PACKAGE}.{name}", text))
    return f"sources = {json.dumps(sources)!r}{_START}"


_START_S = 60.0
# The process in the container ends a run in time; if it fails to, the container is removed.
_GRACE_S = 10.0
_CAUSES: Mapping[str, Stop] = {"time": "time", "output": "output"}


class ContainerLostError(Exception):
    """A container has ended, or does not answer.

    Args:
        message: The known cause.
        facts: The facts about the program in it; None if there are none.
    """

    def __init__(self, message: str, facts: Facts | None = None) -> None:
        super().__init__(message)
        self._facts = facts

    def as_result(self, limits: Limits) -> RunResult:
        """The result of the program in it."""
        if self._facts is None:
            return failed(str(self))
        outcome, detail = classify(self._facts, limits)
        return RunResult(outcome=outcome, detail=detail)


def failed(reason: str) -> RunResult:
    """The result of a run that there was not, through no fault of the program's."""
    return RunResult(outcome=Outcome.SANDBOX_ERROR, detail=reason)


@dataclass(frozen=True, slots=True)
class ContainerOrder:
    """A run without its command line.

    Attributes:
        files: The files for the working directory.
        executable: Which of the files are programs.
        stdin: The program's input; sessions receive theirs later.
        limits: Its resource limits.
        collect: The files to bring back.
        collect_bytes: Their largest total size, in bytes.
        session: Whether it is an interactive session.
    """

    files: Mapping[str, bytes]
    limits: Limits
    executable: frozenset[str] = frozenset()
    stdin: bytes = b""
    collect: tuple[str, ...] = ()
    collect_bytes: int = 0
    session: bool = False


class Container:
    """A container that runs one program after another; `start` makes one.

    Args:
        made: Docker's container object.
        attached: The socket of its streams.
        shape: How much programs may use.
        guarantees: The guarantees that its results report.
    """

    def __init__(
        self, made: DockerContainer, attached: Any, shape: ContainerShape, guarantees: Guarantees
    ) -> None:
        self.shape = shape
        self.runs = 0
        self.tools = Toolchain()
        self._made = made
        self._attached = attached
        # A file object around the socket, unless the engine is spoken to over TLS.
        self._conversation = ContainerConversation(getattr(attached, "_sock", attached))
        self._guarantees = guarantees
        self._is_ready = False

    @classmethod
    def start(
        cls,
        engine: docker.DockerClient,
        image: str,
        shape: ContainerShape,
        *,
        cpus: float,
        guarantees: Guarantees,
        read_only: Sequence[str] = (),
    ) -> "Container":
        """Make a container that is ready for a program.

        Args:
            engine: The Docker Engine.
            image: With Python 3 in it.
            shape: How much programs may use.
            cpus: How many processors it may use, on average.
            guarantees: The guarantees that its results report.
            read_only: What programs see of the engine's machine.

        Raises:
            ContainerLostError: If it does not start.
        """
        try:
            options = container_options(image, first_process(), shape, cpus=cpus, read_only=read_only)
            made = engine.containers.create(**options)
            attached = made.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        except ENGINE_ERRORS as error:
            raise ContainerLostError(f"no container could be made: {error}") from error
        container = cls(made, attached, shape, guarantees)
        try:
            made.start()
            container.get_ready()
        except (*ENGINE_ERRORS, ContainerLostError) as error:
            container.remove()
            raise ContainerLostError(f"no container could be started: {error}") from error
        return container

    def get_ready(self) -> None:
        """Wait until it is clean and takes a program.

        Raises:
            ContainerLostError: If it does not get there.
        """
        if self._is_ready:
            return
        try:
            kind, payload = self._conversation.frame(time.monotonic() + _START_S)
        except (ConversationEndedError, TimeoutError) as error:
            raise self._lost(error) from error
        state = json.loads(payload)
        if kind != READY or not state["clean"]:
            raise ContainerLostError("what a program left could not be deleted")
        tools = state["tools"]
        self.tools = Toolchain(tools["python"] or "python3", tools["bash"] or "bash", tools["cxx"])
        self._is_ready = True

    def begin(self, command: Sequence[str], order: ContainerOrder) -> None:
        """Start a program.

        Raises:
            ContainerLostError: If the container is gone.
        """
        self._is_ready = False
        self.runs += 1
        limits = order.limits
        contents = [(name, content, name in order.executable) for name, content in order.files.items()]
        message = {
            "session": order.session,
            "command": list(command),
            "environment": dict(ENVIRONMENT),
            "wall_seconds": limits.wall_seconds,
            "keep": limits.output_kb * 1024,
            "rlimits": run_limits(limits),
            "files": [[name, len(content), executable] for name, content, executable in contents],
            "stdin": len(order.stdin),
            "collect": order.collect,
            "collect_bytes": order.collect_bytes,
        }
        parts = (*(content for _, content, _ in contents), order.stdin)
        self._send(RUN, json.dumps(message).encode(), *parts, deadline=time.monotonic() + _START_S)

    def give_input(self, data: bytes, deadline: float, held_until: float) -> None:
        """Send input to a session; wait while the program does not read, or while its output is not read.

        Args:
            data: The input.
            deadline: When the program must have read it.
            held_until: Until then, output is read only up to the buffer's bound.

        Raises:
            ContainerLostError: If the container is gone, or does not read the input.
        """
        self._send(INPUT, data, deadline=deadline, held_until=held_until)

    def stop(self, deadline: float) -> None:
        """End a session's program.

        Raises:
            ContainerLostError: If the container is gone, or does not take it.
        """
        self._send(STOP, b"", deadline=deadline)

    def has_news(self, deadline: float) -> bool:
        """Whether there is a frame to read before a moment."""
        return self._conversation.has_frame(deadline)

    def news(self, order: ContainerOrder) -> bytes | RunResult:
        """Wait for the next output of a session, or for the result of a run.

        Raises:
            ContainerLostError: If the container is gone, or does not answer in time.
        """
        deadline = time.monotonic() + order.limits.wall_seconds + _GRACE_S
        try:
            kind, payload = self._conversation.frame(deadline)
            if kind != RESULT:
                return payload
            facts = json.loads(payload)
            stdout = self._conversation.exactly(facts["stdout"], deadline)
            stderr = self._conversation.exactly(facts["stderr"], deadline)
            files = {name: self._conversation.exactly(size, deadline) for name, size in facts["files"]}
        except (ConversationEndedError, TimeoutError) as error:
            raise self._lost(error) from error
        # A session's output has been read already.
        return self._result(facts, b"" if order.session else stdout, stderr, files, order.limits)

    def run(self, command: Sequence[str], order: ContainerOrder) -> RunResult:
        """Run a program to its end.

        Raises:
            ContainerLostError: If the container is gone, or does not answer in time.
        """
        self.begin(command, order)
        result = self.news(order)
        assert isinstance(result, RunResult)
        return result

    def hang_up(self) -> None:
        """Abandon the running program, from any thread; the container is lost."""
        self._conversation.hang_up()

    def remove(self) -> None:
        """Take it away, and whatever runs in it."""
        # An attached but unread stream would block the removal.
        self._conversation.close()
        self._attached.close()
        with contextlib.suppress(*ENGINE_ERRORS):
            self._made.remove(force=True)

    def _send(
        self, kind: int, payload: bytes, *parts: bytes, deadline: float, held_until: float = 0.0
    ) -> None:
        try:
            self._conversation.send(kind, payload, *parts, deadline=deadline, held_until=held_until)
        except (ConversationEndedError, TimeoutError) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> ContainerLostError:
        """Why it does not answer, as far as the engine knows."""
        try:
            self._made.reload()
            state: dict[str, Any] = self._made.attrs["State"]
        except ENGINE_ERRORS as engine_error:
            return ContainerLostError(f"the Docker Engine does not answer: {engine_error}")
        if state["OOMKilled"]:
            return ContainerLostError(str(error), Facts(memory_exhausted=True))
        # Nothing but a program keeps a container from answering that the engine says is there.
        return ContainerLostError(str(error), Facts(stopped_for="time") if state["Running"] else None)

    def _result(
        self, facts: Mapping[str, Any], stdout: bytes, stderr: bytes, files: dict[str, bytes], limits: Limits
    ) -> RunResult:
        if facts["cause"] == "files":
            return too_large(str(facts["refused"]))
        if facts["refused"]:
            outcome, detail = Outcome.SANDBOX_ERROR, f"the program could not be started: {facts['refused']}"
        else:
            outcome, detail = classify(
                Facts(
                    exit_code=facts["exit_code"],
                    signal=facts["signal"],
                    stopped_for=_CAUSES.get(facts["cause"]),
                    memory_exhausted=facts["out_of_memory"] > 0,
                    disk_full=facts["disk_full"],
                    pids_refused=facts["forks_refused"] > 0,
                    cpu_seconds=facts["cpu_seconds"],
                    stderr=stderr,
                ),
                limits,
            )
        if facts["cause"] == "stopped":
            outcome, detail = Outcome.OK, "it was closed"
        return RunResult(
            outcome=outcome,
            exit_code=facts["exit_code"],
            signal=facts["signal"],
            stdout=stdout,
            stderr=stderr,
            stdout_truncated=facts["stdout_size"] > facts["stdout"],
            stderr_truncated=facts["stderr_size"] > len(stderr),
            wall_seconds=facts["wall_seconds"],
            cpu_seconds=facts["cpu_seconds"],
            peak_memory_mb=facts["peak_memory_mb"],
            files=files,
            detail=detail,
            guarantees=self._guarantees,
        )
