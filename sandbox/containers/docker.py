"""Programs in warm containers of a Docker Engine, each used by one run or session at a time and replaced after some.

Needs the extra `docker`. A process with access to a Docker Engine is root on its machine: run a server with this
back-end on a machine of its own, which others reach through `remote`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import docker

from rollgym.sandbox.containers.container import Container, ContainerLostError, ContainerOrder, failed
from rollgym.sandbox.containers.engine import ContainerShape, connect
from rollgym.sandbox.core.base import (
    Cancellation,
    Guarantees,
    Outcome,
    Program,
    RunResult,
    SandboxSession,
    SandboxUnavailableError,
)
from rollgym.sandbox.core.languages import MissingToolError, Toolchain, commands
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.core.probe import probe_sandbox
from rollgym.sandbox.core.uploads import EndedSession, refused
from rollgym.sandbox.supervisor.files import plain_names, plain_parts

# After these a container has nothing but clean directories to show; after all others it is taken away.
_HARMLESS = frozenset({Outcome.OK, Outcome.NON_ZERO_EXIT, Outcome.TIME_LIMIT, Outcome.COMPILE_ERROR})


class Containers:
    """A bounded pool of containers; a borrower waits if none is free.

    Args:
        make: Makes a container.
        limit: The maximum number of containers.
        runs: How many programs a container may run.
    """

    def __init__(self, make: Callable[[ContainerShape], Container], *, limit: int, runs: int) -> None:
        self._make = make
        self._limit = limit
        self._runs = runs
        self._changed = threading.Condition()
        self._idle: list[Container] = []
        self._count = 0
        self._epoch = 0

    @contextmanager
    def borrowed(self, shape: ContainerShape) -> Iterator["ContainerLease"]:
        """Lend a container of a shape; the borrower reports to the lease how it was used.

        Raises:
            ContainerLostError: If no container can be made.
        """
        lease = self.take(shape)
        try:
            yield lease
        finally:
            self.give_back(lease)

    def take(self, shape: ContainerShape) -> "ContainerLease":
        """Take a container until it is given back.

        Raises:
            ContainerLostError: If none can be made.
        """
        while True:
            lease = self._next(shape)
            try:
                lease.container.get_ready()
            except ContainerLostError:
                # The files of the previous program could not be deleted, or it has broken the container.
                self.give_back(lease)
                continue
            return lease

    def _next(self, shape: ContainerShape) -> "ContainerLease":
        with self._changed:
            epoch = self._epoch
            while True:
                fitting = next((each for each in self._idle if each.shape == shape), None)
                if fitting is not None:
                    self._idle.remove(fitting)
                    return ContainerLease(fitting, epoch)
                # If there is no room for a new container, an idle one of another shape is removed.
                unfit = self._idle.pop(0) if self._count >= self._limit and self._idle else None
                if unfit is not None or self._count < self._limit:
                    self._count += unfit is None
                    break
                self._changed.wait()
        try:
            if unfit is not None:
                unfit.remove()
            return ContainerLease(self._make(shape), epoch)
        except BaseException:
            self._one_less()
            raise

    def give_back(self, lease: "ContainerLease") -> None:
        """Keep a container for the next program, or take it away."""
        container = lease.container
        with self._changed:
            if lease.harmless and container.runs < self._runs and lease.epoch == self._epoch:
                self._idle.append(container)
                self._changed.notify()
                return
        try:
            container.remove()
        finally:
            self._one_less()

    def close(self) -> None:
        """Remove idle containers now, and those in use when they are given back; new ones are made on demand."""
        with self._changed:
            self._epoch += 1
            idle, self._idle = self._idle, []
            self._count -= len(idle)
            self._changed.notify_all()
        for container in idle:
            container.remove()

    def _one_less(self) -> None:
        with self._changed:
            self._count -= 1
            self._changed.notify()


class ContainerLease:
    """The use of a container.

    Attributes:
        container: It.
        epoch: How often all containers had been taken away when it was made.
        harmless: Whether it can be used again; it cannot unless it is said.
    """

    def __init__(self, container: Container, epoch: int) -> None:
        self.container = container
        self.epoch = epoch
        self.harmless = False

    def ended(self, result: RunResult) -> None:
        """Note how a run has ended."""
        self.harmless = result.outcome in _HARMLESS


_LATE_S = 10.0
_KEPT_BYTES = 4 * 1024 * 1024


class ContainerSession:
    """See `SandboxSession`; one thread at a time may use it, and any may hang up.

    Args:
        lease: The container, in which the program was started.
        order: The order that was started.
        compiling: How the compiler ended, if there was one.
        give_back: Called with the lease in the end.
    """

    def __init__(
        self,
        lease: ContainerLease,
        order: ContainerOrder,
        compiling: RunResult | None,
        give_back: Callable[[ContainerLease], None],
    ) -> None:
        self._lease: ContainerLease | None = lease
        self._order = order
        self._compiling = compiling
        self._give_back = give_back
        self._ends = time.monotonic() + order.limits.wall_seconds
        # By then the program has been ended, and its unread input is dropped.
        self._latest = self._ends + _LATE_S
        self._unread = bytearray()
        self._result: RunResult | None = None

    @property
    def alive(self) -> bool:
        """Whether the program is still running."""
        self._look(time.monotonic())
        return self._result is None

    def write(self, data: bytes) -> None:
        """Write to its standard input; see `SandboxSession`."""
        if not self.alive or self._lease is None:
            raise BrokenPipeError("the program has ended")
        try:
            self._lease.container.give_input(data, self._latest, held_until=self._ends)
        except ContainerLostError as error:
            self._lose(error)
            raise BrokenPipeError(str(error)) from error

    def read(self, timeout_seconds: float) -> bytes:
        """Return the new output; see `SandboxSession`."""
        deadline = time.monotonic() + timeout_seconds
        self._look(time.monotonic())
        if not self._unread and self._result is None:
            self._look(deadline)
        data = bytes(self._unread)
        self._unread.clear()
        return data

    def hang_up(self) -> None:
        """End it, from any thread; its container goes with it."""
        lease = self._lease
        if lease is not None:
            lease.container.hang_up()

    def close(self) -> RunResult:
        """End the program; see `SandboxSession`."""
        if self._result is None and self._lease is not None:
            deadline = time.monotonic() + _LATE_S
            try:
                self._lease.container.stop(deadline)
            except ContainerLostError as error:
                self._lose(error)
            while self._result is None and time.monotonic() < deadline:
                self._look(deadline, discards=True)
        if self._result is None:
            # It goes with its container.
            self._finish(RunResult(outcome=Outcome.OK, detail="it was closed", compiling=self._compiling))
        assert self._result is not None
        return self._result

    def _look(self, deadline: float, *, discards: bool = False) -> None:
        """Process the container's messages; wait for them until the deadline.

        While the program runs, output is read only up to the buffer's bound: the rest stays in the program's pipe until
        the caller reads.
        """
        while self._result is None and self._lease is not None:
            if not discards and len(self._unread) >= _KEPT_BYTES and time.monotonic() < self._ends:
                return
            try:
                if not self._lease.container.has_news(deadline):
                    return
                news = self._lease.container.news(self._order)
            except ContainerLostError as error:
                self._lose(error)
                return
            if isinstance(news, RunResult):
                self._lease.ended(news)
                self._finish(replace(news, compiling=self._compiling))
            elif not discards:
                self._unread += news
                deadline = time.monotonic()

    def _lose(self, error: ContainerLostError) -> None:
        self._finish(replace(error.as_result(self._order.limits), compiling=self._compiling))

    def _finish(self, result: RunResult) -> None:
        self._result = result
        if self._lease is not None:
            self._give_back(self._lease)
            self._lease = None


DEFAULT_IMAGE = "python:3.11-slim-bookworm"
_Content = TypeVar("_Content")


class DockerSandbox:
    """A back-end; see `Sandbox`.

    Args:
        image: The image of programs: it must have Python 3, and may have Bash and g++ (`deploy/sandbox/Dockerfile`).
        containers: How many there are at most, and so how many programs run at one time; by default half as many again
            as this machine has processors.
        runs_per_container: After how many programs a container is replaced; with 1, each has its own.
        cpus: Processors for one container, on average.
        read_only: Files and directories of the engine's machine that programs see besides the image.
    """

    name = "docker"

    def __init__(
        self,
        image: str = DEFAULT_IMAGE,
        *,
        containers: int | None = None,
        runs_per_container: int = 100,
        cpus: float = 1.0,
        read_only: Sequence[str] = (),
    ) -> None:
        self._image = image
        self._cpus = cpus
        self._read_only = tuple(read_only)
        self.claims = Guarantees(
            backend=self.name,
            level="container",
            files=True,
            network=True,
            processes=True,
            privileges=True,
            system_calls=True,
            memory="sum",
            disk=True,
            fresh=runs_per_container == 1,
        )
        if containers is None:
            containers = max(2, (os.cpu_count() or 1) * 3 // 2)
        self._pool = Containers(self._start, limit=containers, runs=runs_per_container)
        self._seen: Guarantees | None = None
        self._connecting = threading.Lock()
        self._connected: docker.DockerClient | None = None

    def run(
        self,
        program: Program,
        *,
        files: Mapping[str, bytes] = {},
        stdin: bytes = b"",
        limits: Limits = DEFAULT_LIMITS,
        collect: Iterable[str] = (),
        cancellation: Cancellation | None = None,
    ) -> RunResult:
        """Run a program to its end, or until it is cancelled; see `Sandbox`."""
        cancellation = cancellation or Cancellation()
        if (result := refused(program, files, limits)) is not None:
            return result
        try:
            order = ContainerOrder(
                files=_checked(files),
                limits=limits,
                stdin=stdin,
                collect=plain_names(collect),
                collect_bytes=limits.output_kb * 1024,
            )
            built = self._build(program, order, cancellation)
            if isinstance(built, RunResult):
                return built
            with self._pool.borrowed(ContainerShape.of(limits)) as lease:
                return built.run(lease, cancellation)
        except (ContainerLostError, SandboxUnavailableError, MissingToolError, ValueError) as error:
            return failed(str(error))

    def open_session(
        self, program: Program, *, files: Mapping[str, bytes] = {}, limits: Limits = DEFAULT_LIMITS
    ) -> SandboxSession:
        """Start an interactive session with a program; see `Sandbox`.

        Its standard error is kept for the result of `close`.

        Raises:
            SandboxUnavailableError: If it cannot be started.
        """
        if (result := refused(program, files, limits)) is not None:
            return EndedSession(result)
        try:
            order = ContainerOrder(files=_checked(files), limits=limits, session=True)
            built = self._build(program, order, Cancellation())
            if isinstance(built, RunResult):
                return EndedSession(built)
            lease = self._pool.take(ContainerShape.of(limits))
        except (ContainerLostError, MissingToolError, ValueError) as error:
            raise SandboxUnavailableError(f"{self.name}: {error}") from error
        try:
            built.begin(lease)
        except ContainerLostError as error:
            self._pool.give_back(lease)
            raise SandboxUnavailableError(f"{self.name}: {error}") from error
        return ContainerSession(lease, built.order, built.compiling, self._pool.give_back)

    def probe(self) -> Guarantees:
        """Run a control program and attempts to escape; see `Sandbox`."""
        if self._seen is None:
            self._engine()
            self._seen = probe_sandbox(self)
        return self._seen

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        return "The image must have Python 3 with its whole standard library"

    def close(self) -> None:
        """Remove all containers of the back-end."""
        self._pool.close()
        with self._connecting:
            if self._connected is not None:
                self._connected.close()
                self._connected = None

    def _engine(self) -> docker.DockerClient:
        with self._connecting:
            if self._connected is None:
                self._connected = connect(self._image)
            return self._connected

    def _start(self, shape: ContainerShape) -> Container:
        return Container.start(
            self._engine(),
            self._image,
            shape,
            cpus=self._cpus,
            guarantees=self._seen or self.claims,
            read_only=self._read_only,
        )

    def _build(
        self, program: Program, order: ContainerOrder, cancellation: Cancellation
    ) -> "_Built | RunResult":
        """Compile the program; return a result only if the compiler failed.

        A compiler gets a container of its own, with other limits.
        """
        beside = tuple(order.files)
        what = commands(program, Toolchain(), files=beside)
        source = program.source.encode(errors="surrogateescape")
        order = replace(order, files={what.source_name: source, **order.files})
        if what.compile is None:
            return _Built(program, beside, order, None)
        limits = replace(
            order.limits,
            wall_seconds=order.limits.compile_seconds,
            cpu_seconds=None,
            memory_mb=order.limits.compile_memory_mb,
        )
        compiler = ContainerOrder(
            files=order.files,
            limits=limits,
            collect=(what.binary_name,),
            collect_bytes=limits.disk_mb * 2**20,
        )
        with self._pool.borrowed(ContainerShape.of(limits)) as lease:
            command = commands(program, lease.container.tools, files=beside).compile
            assert command is not None
            result = _run(lease, command, compiler, cancellation)
        binary = result.files.get(what.binary_name)
        result = replace(result, files={})
        if result.outcome is Outcome.SANDBOX_ERROR:
            return result
        if result.outcome is not Outcome.OK or binary is None:
            detail = f"the compiler failed: {result.detail or 'it made no program'}"
            return replace(result, outcome=Outcome.COMPILE_ERROR, detail=detail, compiling=result)
        files = {**order.files, what.binary_name: binary}
        order = replace(order, files=files, executable=frozenset({what.binary_name}))
        return _Built(program, beside, order, result)


@dataclass(frozen=True, slots=True)
class _Built:
    """A program that can be started, with the files that were given beside it."""

    program: Program
    beside: tuple[str, ...]
    order: ContainerOrder
    compiling: RunResult | None

    def run(self, lease: ContainerLease, cancellation: Cancellation) -> RunResult:
        return replace(_run(lease, self._command(lease), self.order, cancellation), compiling=self.compiling)

    def begin(self, lease: ContainerLease) -> None:
        lease.container.begin(self._command(lease), self.order)

    def _command(self, lease: ContainerLease) -> Sequence[str]:
        return commands(self.program, lease.container.tools, files=self.beside).run


def _run(
    lease: ContainerLease, command: Sequence[str], order: ContainerOrder, cancellation: Cancellation
) -> RunResult:
    try:
        with cancellation.calling(lease.container.hang_up):
            result = lease.container.run(command, order)
    except ContainerLostError as error:
        return error.as_result(order.limits)
    lease.ended(result)
    return result


def _checked(files: Mapping[str, _Content]) -> Mapping[str, _Content]:
    """Files by paths that do not lead out of the working directory.

    Raises:
        ValueError: If one does.
    """
    for name in files:
        plain_parts(name)
    return files
