"""A control program and an attempt to escape: they verify the guarantees that a back-end claims."""

import json
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rollgym.sandbox.core.base import Guarantees, Outcome, Program, RunResult, SandboxUnavailableError
from rollgym.sandbox.core.limits import Limits

_LIMITS = Limits(wall_seconds=20, memory_mb=256, pids=32, disk_mb=2, inodes=256)
# A finding is true if a forbidden action was possible.
_ATTEMPT = """
import ctypes, json, os, signal, socket, sys
asked = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)

def works(action):
    try:
        return bool(action())
    except OSError:
        return False

def connects(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(1)
        return connection.connect_ex(address) == 0

def sees_host():
    for name in os.listdir("/proc"):
        if name.isdigit() and works(lambda: asked["token"] in open(f"/proc/{name}/cmdline").read()):
            return True
    return False

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(line.split()[1] for line in lines if line.startswith(key + ":"))

def fills_disk():
    for number in range(8):
        with open(f"filler{number}", "wb") as file:
            file.write(bytes(1 << 20))
    return True

works(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", asked["port"])))
works(lambda: os.kill(asked["sentinel"], signal.SIGKILL) is None)
print(json.dumps({
    "control": asked["nonce"],
    "reads": works(lambda: open(asked["secret"]).read()),
    "writes": works(lambda: open(asked["secret"] + ".w", "w").write("x")),
    "tcp": works(lambda: connects(socket.AF_INET, ("127.0.0.1", asked["port"]))),
    "abstract": works(lambda: connects(socket.AF_UNIX, asked["abstract"])),
    "sees": works(sees_host),
    "root": os.getuid() == 0,
    "namespaces": libc.unshare(0x10000000) == 0,
    "io_uring": libc.syscall(425, 1, ctypes.create_string_buffer(120)) >= 0,
    "vsock": works(lambda: socket.socket(40, socket.SOCK_STREAM)),
    "fills": asked["disk"] and works(fills_disk),
    "capabilities": works(lambda: int(status("CapEff"), 16) or int(status("CapBnd"), 16)),
    "privileges": works(lambda: status("NoNewPrivs") != "1"),
}))
"""


class Probed(Protocol):
    """The part of a back-end that a probe calls."""

    name: str
    claims: Guarantees

    def run(self, program: Program, *, stdin: bytes = b"", limits: Limits) -> RunResult:
        """Run a program inside the back-end."""

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""


@dataclass(frozen=True, slots=True)
class _Bait:
    """Resources that only the host has."""

    secret: str
    port: int
    udp: socket.socket
    abstract: str
    token: str
    sentinel: "subprocess.Popen[bytes]"


def probe_sandbox(sandbox: Probed) -> Guarantees:
    """Return the claims of a back-end that hold.

    Raises:
        SandboxUnavailableError: If the control program does not run.
    """
    nonce = os.urandom(8).hex()
    with _bait() as bait:
        asked = {
            "nonce": nonce,
            "secret": bait.secret,
            "port": bait.port,
            "abstract": bait.abstract,
            "token": bait.token,
            "sentinel": bait.sentinel.pid,
            "disk": sandbox.claims.disk,
        }
        result = sandbox.run(Program("python", _ATTEMPT), stdin=json.dumps(asked).encode(), limits=_LIMITS)
        survived = bait.sentinel.poll() is None
        written = Path(bait.secret + ".w").exists()
        heard = bool(select.select([bait.udp], [], [], 0)[0])
    if result.outcome is not Outcome.OK:
        what = result.stderr.decode(errors="replace").strip().splitlines()
        reason = f"{result.detail}{': ' + what[-1] if what else ''}"
        raise SandboxUnavailableError(
            f"{sandbox.name} does not work here: {reason}. {sandbox.remedy(reason)}"
        )
    found = json.loads(result.stdout)
    if found["control"] != nonce:
        raise SandboxUnavailableError(
            f"{sandbox.name} does not work here: the control program said something else"
        )
    return _judge(sandbox.claims, found, survived, written or heard, result)


def _judge(
    claims: Guarantees, found: dict[str, Any], survived: bool, reached_out: bool, result: RunResult
) -> Guarantees:
    """Withdraw each claim that the attempt has disproved; a disproved claim lowers the level, too."""
    seen = replace(
        claims,
        files=claims.files and not (found["reads"] or found["writes"] or reached_out),
        network=claims.network and not (found["tcp"] or found["abstract"] or reached_out),
        processes=claims.processes and not found["sees"] and survived,
        privileges=claims.privileges
        and not (found["capabilities"] or found["privileges"] or found["root"] or found["namespaces"]),
        system_calls=claims.system_calls and not (found["io_uring"] or found["vsock"]),
        disk=claims.disk and not found["fills"],
        memory=result.guarantees.memory if result.guarantees is not None else claims.memory,
    )
    kept = replace(seen, memory=claims.memory) == claims
    return seen if kept else replace(seen, level="none")


@contextmanager
def _bait() -> Iterator[_Bait]:
    token, abstract = os.urandom(16).hex(), f"\0rollgym-{os.urandom(8).hex()}"
    waiting = ["/bin/sh", "-c", "read line", token]
    with (
        tempfile.TemporaryDirectory(prefix="rollgym-probe-") as directory,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as unix,
        subprocess.Popen(waiting, stdin=subprocess.PIPE) as sentinel,
    ):
        secret = Path(directory, "secret")
        secret.write_text(token)
        # All users may read it: only the sandbox must keep a program from it.
        os.chmod(directory, 0o777)
        os.chmod(secret, 0o644)
        udp.bind(tcp.getsockname())
        unix.bind(abstract)
        unix.listen()
        yield _Bait(str(secret), tcp.getsockname()[1], udp, abstract, token, sentinel)
