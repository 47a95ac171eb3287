"""What a run is given to begin with, and who holds back whom: apart from the back-ends that every test runs on."""

import contextlib
import select
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from rollgym.sandbox.containers.container import ContainerConversation
from rollgym.sandbox.containers.inside.frames import INPUT
from rollgym.sandbox.core.base import Language, Outcome, Program
from rollgym.sandbox.core.languages import Toolchain, commands
from rollgym.sandbox.core.limits import Limits
from rollgym.sandbox.core.uploads import refused
from rollgym.sandbox.local.backends import NamespaceSandbox
from rollgym.sandbox.remote.remote import RemoteSandbox
from rollgym.sandbox.selection import make_sandbox
from rollgym.sandbox.warm.pool import WarmPool
from tests.support.sandboxes import working_sandbox
from tests.support.wire import Server

SHOUT = Program("bash", "echo ran")


@pytest.mark.parametrize(
    ("files", "limits", "fits"),
    [
        ({}, Limits(disk_mb=1, inodes=1), True),
        ({"a": b""}, Limits(inodes=1), False),
        ({"a": b""}, Limits(inodes=2), True),
        ({"a/b": b"", "a/c": b""}, Limits(inodes=4), True),
        ({"a/b": b"", "c/c": b""}, Limits(inodes=4), False),
        ({"a": bytes((1 << 20) - 4096)}, Limits(disk_mb=1), True),
        ({"a": bytes((1 << 20) - 4095)}, Limits(disk_mb=1), False),
        ({str(n): b"x" for n in range(255)}, Limits(disk_mb=1), True),
        ({str(n): b"x" for n in range(256)}, Limits(disk_mb=1), False),
    ],
)
def test_room_is_counted_in_pages_and_entries(files: dict[str, bytes], limits: Limits, fits: bool) -> None:
    result = refused(SHOUT, files, limits)
    assert (result is None) == fits
    assert result is None or result.outcome is Outcome.DISK_LIMIT


def test_the_back_end_that_is_no_boundary_refuses_as_the_others_do() -> None:
    with contextlib.closing(make_sandbox("unsafe")) as sandbox:
        result = sandbox.run(SHOUT, files={"big": bytes(2 << 20)}, limits=Limits(disk_mb=1))
        assert (result.outcome, result.stdout) == (Outcome.DISK_LIMIT, b"")
        assert (
            sandbox.open_session(SHOUT, files={"big": bytes(2 << 20)}, limits=Limits(disk_mb=1)).close()
            == result
        )
        ran = sandbox.run(Program("python", "print(open('main.py').read())"), files={"main.py": b"beside"})
        assert ran.stdout == b"beside\n"


def test_a_warm_sandbox_refuses_and_keeps_the_program_as_the_others_do() -> None:
    working_sandbox()
    with contextlib.closing(WarmPool(NamespaceSandbox(), workers=1)) as pool:
        pool.probe()
        tight = Limits(disk_mb=64, inodes=4096)
        result = pool.run(Program("python", "print(1)"), files={"big": bytes(65 << 20)}, limits=tight)
        assert (result.outcome, result.stdout) == (Outcome.DISK_LIMIT, b"")
        ran = pool.run(Program("python", "print(open('main.py').read())"), files={"main.py": b"beside"})
        assert ran.stdout == b"beside\n"
        assert pool.run(Program("python", "print(2)")).stdout == b"2\n"


def test_what_a_remote_server_takes_no_request_for_is_the_same_outcome() -> None:
    files, room = {"big": bytes(3 << 20)}, Limits(disk_mb=64)
    with (
        Server("--no-builtin", "--sandbox", "auto", "--max-request-bytes", "1048576") as server,
        contextlib.closing(RemoteSandbox(server.url, patience_s=0)) as sandbox,
    ):
        result = sandbox.run(SHOUT, files=files, limits=room)
        assert (result.outcome, result.stdout) == (Outcome.DISK_LIMIT, b"")
        assert "max_request_bytes" in result.detail
        for size in (1 << 20, 40 << 20):
            session = sandbox.open_session(SHOUT, files={"big": bytes(size)}, limits=room)
            assert not session.alive
            assert session.close().outcome is Outcome.DISK_LIMIT
        assert sandbox.run(SHOUT).stdout == b"ran\n"


class Impatient(socketserver.ThreadingTCPServer):
    """Stands before a server and breaks each connection on which more comes than the server takes, with no word."""

    daemon_threads = True

    def __init__(self, port: int, most: int) -> None:
        super().__init__(("127.0.0.1", 0), Passing)
        self.port, self.most = port, most
        self.broken = 0


class Passing(socketserver.BaseRequestHandler):
    server: Impatient

    def handle(self) -> None:
        with (
            socket.create_connection(("127.0.0.1", self.server.port)) as upstream,
            contextlib.suppress(OSError),
        ):
            heard = 0
            while True:
                for ready in select.select([self.request, upstream], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    heard += len(data) if ready is self.request else 0
                    if heard > self.server.most:
                        self.server.broken += 1
                        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        self.request.close()
                        return
                    (upstream if ready is self.request else self.request).sendall(data)


def test_a_refusal_that_is_lost_on_the_way_is_the_same_outcome() -> None:
    """A server that refuses stops to read, and what it says is lost where much is still on its way."""
    room = Limits(disk_mb=64)
    with (
        Server("--no-builtin", "--sandbox", "auto", "--max-request-bytes", "1048576") as server,
        Impatient(server.port, 1 << 20) as proxy,
        contextlib.closing(
            RemoteSandbox(f"http://127.0.0.1:{proxy.server_address[1]}", patience_s=0)
        ) as sandbox,
    ):
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        result = sandbox.run(SHOUT, files={"big": bytes(3 << 20)}, limits=room)
        assert (result.outcome, result.stdout) == (Outcome.DISK_LIMIT, b"")
        assert "max_request_bytes" in result.detail
        session = sandbox.open_session(SHOUT, files={"big": bytes(3 << 20)}, limits=room)
        assert session.close().outcome is Outcome.DISK_LIMIT
        assert proxy.broken == 2
        # What is not too large has broken for another reason.
        proxy.most = 1 << 10
        assert sandbox.run(SHOUT, files={"small": bytes(1 << 11)}).outcome is Outcome.SANDBOX_ERROR
        proxy.shutdown()


@pytest.mark.parametrize(
    ("language", "files", "name", "binary"),
    [
        ("python", (), "main.py", ""),
        ("python", ("main.txt", "x/main.py"), "main.py", ""),
        ("python", ("main.py",), "program.py", ""),
        ("python", ("main.py/x",), "program.py", ""),
        ("bash", ("main.sh", "program"), "program_2.sh", ""),
        ("cpp", ("main",), "program.cpp", "program"),
        ("cpp", ("main/x", "program.cpp", "program_2.py"), "program_3.cpp", "program_3"),
    ],
)
def test_the_program_takes_a_name_that_is_free(
    language: Language, files: tuple[str, ...], name: str, binary: str
) -> None:
    what = commands(Program(language, ""), Toolchain(), files=files)
    assert (what.source_name, what.binary_name) == (name, binary)


# -- who is written to and never read ------------------------------------------------------------------------------

DOCKER_HEADER = struct.Struct(">BxxxI")
CHUNK = bytes(64 * 1024)


@pytest.fixture
def talkative() -> Iterator[tuple[ContainerConversation, list[int]]]:
    """A conversation with a container that answers everything with twice as much, for as long as somebody reads."""
    ours, theirs = socket.socketpair()
    heard = [0]

    def answer() -> None:
        with contextlib.suppress(OSError):
            while data := theirs.recv(len(CHUNK)):
                heard[0] += len(data)
                for _ in range(2):
                    theirs.sendall(DOCKER_HEADER.pack(1, len(CHUNK)) + CHUNK)

    thread = threading.Thread(target=answer)
    thread.start()
    conversation = ContainerConversation(ours)
    yield conversation, heard
    conversation.hang_up()
    theirs.close()
    conversation.close()
    thread.join(10)


def test_who_writes_and_never_reads_is_held_back(talkative: tuple[ContainerConversation, list[int]]) -> None:
    conversation, heard = talkative
    now = time.monotonic()
    with pytest.raises(TimeoutError):
        conversation.send(INPUT, bytes(64 << 20), deadline=now + 1.0, held_until=now + 60)
    # What was kept when it was full, and what came with the last piece.
    most = 10 << 20
    assert 4 << 20 <= conversation.held < most
    assert heard[0] < most


def test_who_is_held_back_goes_on_when_the_program_is_over(
    talkative: tuple[ContainerConversation, list[int]],
) -> None:
    conversation, heard = talkative
    now = time.monotonic()
    conversation.send(INPUT, bytes(8 << 20), deadline=now + 60, held_until=now + 0.2)
    assert conversation.held > 4 << 20
    assert heard[0] > 4 << 20
