"""How a monitor starts the sandbox's first process, for each kind of confinement."""

import contextlib
import fcntl
import os
import signal
import socket
from dataclasses import dataclass
from typing import NoReturn

from rollgym.sandbox.kernel import calls
from rollgym.sandbox.supervisor import bwrap, rootfs
from rollgym.sandbox.supervisor.cgroups import ControlGroup, Parents, unique_name
from rollgym.sandbox.supervisor.confinements import CONFINEMENTS, user_of_a_run
from rollgym.sandbox.supervisor.init import run_init
from rollgym.sandbox.supervisor.order import Order

_NEW_NAMESPACES = (
    calls.CLONE_NEWUSER
    | calls.CLONE_NEWNS
    | calls.CLONE_NEWPID
    | calls.CLONE_NEWNET
    | calls.CLONE_NEWIPC
    | calls.CLONE_NEWUTS
    | calls.CLONE_NEWCGROUP
)
_CHANNEL = 3
_OUT_OF_THE_WAY = 64


@dataclass(frozen=True, slots=True)
class FirstProcess:
    """The first process of a sandbox, with the channel to it, and the control group it is in."""

    pid: int
    channel: socket.socket
    group: ControlGroup | None


def enter(order: Order, parents: Parents | None) -> FirstProcess:
    """Start the first process.

    Raises:
        OSError: If the kernel refuses; nothing is left behind.
    """
    is_root = os.geteuid() == 0
    confinement = CONFINEMENTS[order.confinement]
    group = _make_group(parents)
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    pid = 0
    try:
        pid = calls.clone(_NEW_NAMESPACES) if confinement.own_namespaces else os.fork()
        if pid == 0:
            os.close(writing)
            _become_first(order, theirs, reading, is_root)
        # It waits for the letter: until then it has no user, and nothing counts what it uses.
        if confinement.own_namespaces:
            _map_user(pid, is_root)
        if group is not None:
            group.add(pid)
        os.write(writing, b"g")
    except OSError:
        ours.close()
        if pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if group is not None:
            group.remove(patience_seconds=1)
        raise
    finally:
        theirs.close()
        os.close(reading)
        os.close(writing)
    return FirstProcess(pid, ours, group)


def _make_group(parents: Parents | None) -> ControlGroup | None:
    if parents is None:
        return None
    group = ControlGroup(parents, unique_name("run"))
    group.create()
    return group


def _become_first(order: Order, channel: socket.socket, reading: int, is_root: bool) -> None:
    """Continue as the first process in the forked child; does not return."""
    try:
        calls.die_with_parent(signal.SIGKILL)
        if os.read(reading, 1) != b"g":
            os._exit(1)
        os.setsid()
        jail = CONFINEMENTS[order.confinement].jail
        code = bwrap.inner_code() if jail is None else b""
        os.dup2(channel.fileno(), _CHANNEL, inheritable=jail is None)
        channel.detach()
        if jail is None:
            _exec_bubblewrap(order, code, user_of_a_run() if is_root else None)
        os.closerange(_CHANNEL + 1, 1 << 16)
        run_init(socket.socket(fileno=_CHANNEL), jail(order, is_root))
    finally:
        os._exit(1)


def _exec_bubblewrap(order: Order, code: bytes, user: int | None) -> NoReturn:
    """Become bubblewrap, which starts the first process inside; as root, become an ordinary user first."""
    contents = {bwrap.CODE: code}
    contents |= {f"/{name}": text.encode() for name, text in rootfs.OWN_FILES.items()}
    memory = [bwrap.memory_file(content) for content in contents.values()]
    lifted = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for one in memory]
    given = [os.dup2(one, _CHANNEL + 1 + index) for index, one in enumerate(lifted)]
    shown = _shown_to(user, list(order.read_only))
    arguments = bwrap.command_line(order, shown, dict(zip(contents, given, strict=True)), _CHANNEL)
    os.closerange(given[-1] + 1, 1 << 16)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        calls.die_with_parent(signal.SIGKILL)
    os.execve(arguments[0], arguments, {"PATH": "/usr/bin:/bin"})


def _shown_to(user: int | None, paths: list[str]) -> dict[str, str]:
    """Return the paths from which bubblewrap mounts: as another user it may not pass the folders above."""
    if user is not None and paths:
        # Root of a container may have no right to mount: then paths that the user cannot reach are missing inside.
        with contextlib.suppress(OSError):
            return rootfs.stage(paths)
    return {path: path for path in paths}


def _map_user(pid: int, is_root: bool) -> None:
    """Give the new user namespace its one user."""
    if is_root:
        user = group = user_of_a_run()
    else:
        user, group = os.geteuid(), os.getegid()
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"0 {user} 1")
    _write(f"/proc/{pid}/gid_map", f"0 {group} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
