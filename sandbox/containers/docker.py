"""Programs in warm containers of a Docker Engine.

Needs the extra `docker`. A process with access to a Docker Engine is root on its machine: run a server with this
back-end on a machine of its own, which others reach through `remote`.
"""

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import docker

from rollgym.sandbox.containers.container import Container, ContainerLostError, Order, failed
from rollgym.sandbox.containers.engine import connect
from rollgym.sandbox.containers.flags import Shape
from rollgym.sandbox.containers.pool import Containers, Loan
from rollgym.sandbox.containers.session import ContainerSession
from rollgym.sandbox.core.base import SandboxSession, SandboxUnavailableError
from rollgym.sandbox.core.cancelling import Cancellation
from rollgym.sandbox.core.languages import MissingToolError, Toolchain, commands
from rollgym.sandbox.core.limits import DEFAULT_LIMITS, Limits
from rollgym.sandbox.core.probe import probe_sandbox
from rollgym.sandbox.core.program import Program
from rollgym.sandbox.core.result import Guarantees, Outcome, RunResult
from rollgym.sandbox.core.uploads import EndedSession, refused
from rollgym.sandbox.supervisor.files import plain_names, plain_parts

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
            order = Order(
                files=_checked(files),
                limits=limits,
                stdin=stdin,
                collect=plain_names(collect),
                collect_bytes=limits.output_kb * 1024,
            )
            built = self._build(program, order, cancellation)
            if isinstance(built, RunResult):
                return built
            with self._pool.borrowed(Shape.of(limits)) as loan:
                return built.run(loan, cancellation)
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
            order = Order(files=_checked(files), limits=limits, session=True)
            built = self._build(program, order, Cancellation())
            if isinstance(built, RunResult):
                return EndedSession(built)
            loan = self._pool.take(Shape.of(limits))
        except (ContainerLostError, MissingToolError, ValueError) as error:
            raise SandboxUnavailableError(f"{self.name}: {error}") from error
        try:
            built.begin(loan)
        except ContainerLostError as error:
            self._pool.give_back(loan)
            raise SandboxUnavailableError(f"{self.name}: {error}") from error
        return ContainerSession(loan, built.order, built.compiling, self._pool.give_back)

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

    def _start(self, shape: Shape) -> Container:
        return Container.start(
            self._engine(),
            self._image,
            shape,
            cpus=self._cpus,
            guarantees=self._seen or self.claims,
            read_only=self._read_only,
        )

    def _build(self, program: Program, order: Order, cancellation: Cancellation) -> "_Built | RunResult":
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
        compiler = Order(
            files=order.files,
            limits=limits,
            collect=(what.binary_name,),
            collect_bytes=limits.disk_mb * 2**20,
        )
        with self._pool.borrowed(Shape.of(limits)) as loan:
            command = commands(program, loan.container.tools, files=beside).compile
            assert command is not None
            result = _run(loan, command, compiler, cancellation)
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
    order: Order
    compiling: RunResult | None

    def run(self, loan: Loan, cancellation: Cancellation) -> RunResult:
        return replace(_run(loan, self._command(loan), self.order, cancellation), compiling=self.compiling)

    def begin(self, loan: Loan) -> None:
        loan.container.begin(self._command(loan), self.order)

    def _command(self, loan: Loan) -> Sequence[str]:
        return commands(self.program, loan.container.tools, files=self.beside).run


def _run(loan: Loan, command: Sequence[str], order: Order, cancellation: Cancellation) -> RunResult:
    try:
        with cancellation.calling(loan.container.hang_up):
            result = loan.container.run(command, order)
    except ContainerLostError as error:
        return error.as_result(order.limits)
    loan.ended(result)
    return result


def _checked(files: Mapping[str, _Content]) -> Mapping[str, _Content]:
    """Files by paths that do not lead out of the working directory.

    Raises:
        ValueError: If one does.
    """
    for name in files:
        plain_parts(name)
    return files
