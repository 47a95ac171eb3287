"""What surrounds a program, seen from the sandbox's first process: how to get in, to confine, to end everything."""

import contextlib
import os
import platform
import signal
from typing import Protocol

from sandbox.kernel import calls, seccomp
from sandbox.supervisor import rootfs

_NOBODY = 65534


class Jail(Protocol):
    """The part of a first process that differs between back-ends."""

    directory: str

    def enter(self) -> None:
        """Get ready, before anything untrusted runs."""

    def confine(self) -> None:
        """Bind the calling process, which then starts the program, except for its resource limits."""

    def kill_all(self) -> None:
        """End every process of the run but the calling one."""

    def task_limit(self, wanted: int) -> int:
        """Return the number for the limit of a user's threads, so that the run can have `wanted`."""


class NamespaceJail:
    """Namespaces of its own, entered by `clone`; the first process is number 1 of its process namespace.

    Args:
        take_user: Whether the first process must take the user that it was given, as root does.
        disk_mb: MiB of all writable places.
        inodes: Files in them.
        read_only: Directories to show besides the system's.
    """

    directory = "/work"

    def __init__(self, *, take_user: bool, disk_mb: int, inodes: int, read_only: list[str]) -> None:
        self._take_user = take_user
        self._disk_mb, self._inodes, self._read_only = disk_mb, inodes, read_only
        self._outer_proc = -1

    def enter(self) -> None:
        """Take the user, and build the root file system."""
        if self._take_user:
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        # Changing the user cleared both. Without the second, the process cannot open its own files in /proc.
        calls.die_with_parent(signal.SIGKILL)
        calls.prctl(calls.PR_SET_DUMPABLE, 1)
        self._outer_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        calls.set_host_name("sandbox")
        rootfs.build_root(self._disk_mb, self._inodes, self._read_only)

    def confine(self) -> None:
        """Enter a second user namespace, in which there is nothing to have: neither mounts nor a further one."""
        calls.unshare(calls.CLONE_NEWUSER)
        self._write("self/setgroups", "deny")
        self._write("self/uid_map", f"{_NOBODY} 0 1")
        self._write("self/gid_map", f"{_NOBODY} 0 1")
        with contextlib.suppress(
            OSError
        ):  # A container may have made it read-only; the filter of calls remains.
            self._write("sys/user/max_user_namespaces", "0")
        calls.drop_capabilities()
        seccomp.install_filter(seccomp.build_filter(platform.machine()))

    def kill_all(self) -> None:
        """End all others of the process namespace."""
        _kill_everyone()

    def task_limit(self, wanted: int) -> int:
        """Counted by the second user namespace, so nobody else's threads matter."""
        return wanted

    def _write(self, path: str, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._outer_proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _kill_everyone() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
