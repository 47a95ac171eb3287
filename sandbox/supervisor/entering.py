"""How a monitor starts the sandbox's first process, for each kind of confinement."""

import contextlib
import os
import random
import signal
import socket
from dataclasses import dataclass

from sandbox.kernel import calls
from sandbox.supervisor.cgroups import ControlGroup, Parents
from sandbox.supervisor.init import run_init
from sandbox.supervisor.jails import Jail, NamespaceJail
from sandbox.supervisor.order import Order

_NEW_NAMESPACES = (
    calls.CLONE_NEWUSER
    | calls.CLONE_NEWNS
    | calls.CLONE_NEWPID
    | calls.CLONE_NEWNET
    | calls.CLONE_NEWIPC
    | calls.CLONE_NEWUTS
    | calls.CLONE_NEWCGROUP
)
# Root gives each run a user of its own, from a range that nothing else uses; a container may not have it.
_FIRST_USER, _USERS = 0x70000000, 0x0FFFFFFF
_NOBODY = 65534


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
    ours, theirs = socket.socketpair()
    group = _make_group(parents)
    try:
        pid = _clone_into_namespaces(order, ours, theirs, group)
    except OSError:
        ours.close()
        if group is not None:
            group.remove(patience_seconds=0)
        raise
    finally:
        theirs.close()
    return FirstProcess(pid, ours, group)


def _make_group(parents: Parents | None) -> ControlGroup | None:
    if parents is None:
        return None
    group = ControlGroup(parents, f"rollgym-run-{os.getpid()}")
    group.create()
    return group


def _clone_into_namespaces(
    order: Order, ours: socket.socket, theirs: socket.socket, group: ControlGroup | None
) -> int:
    is_root = os.geteuid() == 0
    jail = NamespaceJail(
        take_user=is_root,
        disk_mb=order.limits.disk_mb,
        inodes=order.limits.inodes,
        read_only=list(order.read_only),
    )
    reading, writing = os.pipe()
    pid = calls.clone(_NEW_NAMESPACES)
    if pid == 0:
        os.close(writing)
        if os.read(reading, 1) != b"g":  # Without a user of its own it can do nothing yet.
            os._exit(1)
        become_init(theirs, jail)
    os.close(reading)
    try:
        _map_user(pid, is_root)
        if group is not None:
            group.add(pid)
        os.write(writing, b"g")
    except OSError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(writing)
    return pid


def become_init(channel: socket.socket, jail: Jail) -> None:
    """Turn a forked child into the first process, with nothing open but the channel; does not return."""
    try:
        calls.die_with_parent(signal.SIGKILL)
        os.setsid()
        descriptor = os.dup2(channel.fileno(), 3, inheritable=False)
        os.closerange(descriptor + 1, 1 << 16)
        channel.detach()
        run_init(socket.socket(fileno=descriptor), jail)
    finally:
        os._exit(1)


def _map_user(pid: int, is_root: bool) -> None:
    """Give the new user namespace its one user."""
    if not is_root:
        _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/uid_map", f"0 {os.geteuid()} 1")
        _write(f"/proc/{pid}/gid_map", f"0 {os.getegid()} 1")
        return
    user = _FIRST_USER + random.randrange(_USERS)
    try:
        _write(f"/proc/{pid}/uid_map", f"0 {user} 1")
    except OSError:
        user = _NOBODY
        _write(f"/proc/{pid}/uid_map", f"0 {user} 1")
    _write(f"/proc/{pid}/gid_map", f"0 {user} 1")


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
