"""The back-ends that work here, and a host with something to lose."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollgym.sandbox.core.base import Sandbox, SandboxUnavailableError
from rollgym.sandbox.core.kinds import SANDBOXES
from rollgym.sandbox.selection import make_sandbox
from tests.support.processes import running
from tests.support.wire import Server

# Each of ours that protects and works by its name alone. The last one counts memory itself even where control groups
# are writable.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{each.name: (each.name, {}) for each in SANDBOXES if not (each.argument or each.bounds_nothing)},
    "namespaces-watched": ("namespaces", {"cgroups": False}),
}


# A server with a sandbox of its own stands in for another machine.
REMOTE = "remote"


@pytest.fixture(
    scope="session", params=[*CONFIGURATIONS, REMOTE, pytest.param("docker", marks=pytest.mark.docker)]
)
def configuration(request: pytest.FixtureRequest) -> str:
    """The name of each configuration."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def sandbox(configuration: str, scratch: Path) -> Iterator[Sandbox]:
    """Each back-end that works on this machine."""
    with contextlib.ExitStack() as stack:
        try:
            opened = _make(configuration, scratch, stack)
            opened.probe()
        except SandboxUnavailableError as error:
            pytest.skip(str(error))
        yield opened


def _make(configuration: str, scratch: Path, stack: contextlib.ExitStack) -> Sandbox:
    if configuration == REMOTE:
        flags = ("--no-builtin", "--sandbox", "auto", "--max-request-bytes", "16777216")
        name, options = "remote", {"url": stack.enter_context(Server(*flags)).url}
    elif configuration == "docker":
        # The image can be named, and so can the engine (DOCKER_HOST).
        image = os.environ.get("ROLLGYM_DOCKER_IMAGE")
        name, options = "docker", {"containers": 3} | ({} if image is None else {"image": image})
    else:
        name, options = CONFIGURATIONS[configuration]
        if name == "landlock":
            options = {**options, "scratch": str(scratch)}
    opened = make_sandbox(name, **options)
    stack.callback(opened.close)
    return opened


@dataclass(frozen=True, slots=True)
class Host:
    """What programs try to reach.

    Attributes:
        token: A secret; in a file, an environment variable and a command line.
        secret: The file.
        sentinel: A process that must live on.
        duration: How long programs are to sleep which must not outlive their run; it marks them.
        tcp: A listening socket.
        udp: A socket on the same port.
        unix: A listening socket with a path.
        abstract: A listening socket with a name.
        free_port: A port on which nothing listens.
    """

    token: str
    secret: Path
    sentinel: "subprocess.Popen[bytes]"
    duration: str
    tcp: socket.socket
    udp: socket.socket
    unix: socket.socket
    abstract: socket.socket
    free_port: int

    def told(self, backend: str) -> dict[str, Any]:
        """Return what a program is told of it."""
        return {
            "backend": backend,
            "token": self.token,
            "secret": str(self.secret),
            "sentinel": self.sentinel.pid,
            "server": os.getpid(),
            "duration": self.duration,
            "port": self.tcp.getsockname()[1],
            "address": _own_address(),
            "path": self.unix.getsockname(),
            "abstract": self.abstract.getsockname()[1:].decode(),
            "free_port": self.free_port,
        }


def _own_address() -> str:
    """Return the address of this machine on its network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


@pytest.fixture(scope="session", autouse=True)
def token() -> Iterator[str]:
    """A secret in the environment, there before any back-end starts."""
    token = secrets.token_hex(16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLGYM_TEST_SECRET", token)
        yield token


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory for the runs of this process, which other users can reach."""
    with tempfile.TemporaryDirectory(prefix="rollgym-test-") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.fixture(scope="session")
def host(token: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with a secret, a sentinel and sockets."""
    directory = tmp_path_factory.mktemp("host")
    directory.chmod(0o755)
    for parent in (directory.parent, directory.parent.parent):
        parent.chmod(0o755)
    secret = directory / "secret"
    secret.write_text(token)
    secret.chmod(0o666)
    waiting = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()", token]
    with (
        running(subprocess.Popen(waiting, stdin=subprocess.PIPE)) as sentinel,
        socket.create_server(("0.0.0.0", 0)) as tcp,
        socket.create_server(("127.0.0.1", 0)) as reserved,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        udp.bind(("127.0.0.1", tcp.getsockname()[1]))
        unix.bind(str(directory / "s"))
        os.chmod(directory / "s", 0o777)
        abstract.bind(f"\0rollgym-test-{token[:8]}")
        unix.listen()
        abstract.listen()
        free_port = reserved.getsockname()[1]
        reserved.close()
        yield Host(
            token, secret, sentinel, f"100{secrets.randbelow(10**6)}", tcp, udp, unix, abstract, free_port
        )
