"""The surroundings of a program, seen from the sandbox's first process: how to enter, confine and end them."""

import contextlib
import os
import platform
import shutil
import signal
from typing import Protocol

from rollgym.sandbox.kernel import calls, landlock, seccomp
from rollgym.sandbox.supervisor import rootfs, tree

_NOBODY = 65534


class Jail(Protocol):
    """The part of a first process that differs between back-ends."""

    directory: str
    owner: int | None
    """The owner of files in the working directory; None for the calling process's own user."""

    def enter(self) -> None:
        """Get ready, before anything untrusted runs."""

    def confine(self) -> None:
        """Bind the calling process, which then starts the program, except for its resource limits."""

    def kill_all(self) -> None:
        """End every process of the run but the calling one."""

    def task_limit(self, wanted: int) -> int:
        """Return the number for the limit of a user's threads, so that the run can have `wanted`."""

    def leave(self) -> None:
        """Remove the remains of the run on the host."""


class NamespaceJail:
    """Namespaces of its own, entered by `clone`; the first process is number 1 of its process namespace.

    Args:
        take_user: Whether the first process must take the user that it was given, as root does.
        disk_mb: MiB of all writable places.
        inodes: Files in them.
        read_only: Directories to show besides the system's.
    """

    directory = "/work"
    owner: int | None = None

    def __init__(self, *, take_user: bool, disk_mb: int, inodes: int, read_only: list[str]) -> None:
        self._take_user = take_user
        self._disk_mb, self._inodes, self._read_only = disk_mb, inodes, read_only
        self._outer_proc = -1

    def enter(self) -> None:
        """Take the user, and build the root file system."""
        shown = rootfs.open_shown(self._read_only)
        if self._take_user:
            os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        # Changing the user cleared both. Without the second, the process cannot open its own files in /proc.
        calls.die_with_parent(signal.SIGKILL)
        calls.prctl(calls.PR_SET_DUMPABLE, 1)
        self._outer_proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        calls.set_host_name("sandbox")
        with contextlib.suppress(OSError):  # If refused, programs cannot reach each other either.
            calls.bring_up_loopback()
        rootfs.build_root(self._disk_mb, self._inodes, shown)

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
        seccomp.install_filter(seccomp.build_filter(platform.machine(), network=True))

    def kill_all(self) -> None:
        """End all others of the process namespace."""
        _kill_everyone()

    def task_limit(self, wanted: int) -> int:
        """Return the limit unchanged: the second user namespace counts tasks, so other processes do not matter."""
        return wanted

    def leave(self) -> None:
        """The kernel removes everything with the last process."""

    def _write(self, path: str, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self._outer_proc)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


class InnerJail:
    """Inside of namespaces that another program has made; the first process is number 1 there."""

    directory = "/work"
    owner: int | None = None

    def enter(self) -> None:
        """Close this process to programs of its own user, which the program is."""
        calls.prctl(calls.PR_SET_DUMPABLE, 0)

    def confine(self) -> None:
        """Put the filter of system calls on."""
        calls.drop_capabilities()
        seccomp.install_filter(seccomp.build_filter(platform.machine(), network=True))

    def kill_all(self) -> None:
        """End all others of the process namespace."""
        _kill_everyone()

    def task_limit(self, wanted: int) -> int:
        """This process is of the same user."""
        return wanted + 1

    def leave(self) -> None:
        """The kernel removes everything with the last process."""


class PlainJail:
    """A directory of the host, and processes among its others.

    Args:
        directory: The working directory, which is made and removed again.
        user: The user that the program becomes; None to keep the present user.
        bounded: Whether the program gives up files and network; False for no protection at all.
        read_only: Directories to show besides the system's.
    """

    def __init__(self, directory: str, user: int | None, *, bounded: bool, read_only: list[str]) -> None:
        self.directory, self.owner = directory, user
        self._bounded, self._read_only = bounded, read_only

    def enter(self) -> None:
        """Make the working directory, and adopt orphaned processes."""
        calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)
        os.mkdir(self.directory, 0o700)
        os.mkdir(f"{self.directory}/tmp", 0o700)
        if self.owner is not None:
            for path in (self.directory, f"{self.directory}/tmp"):
                os.chown(path, self.owner, self.owner)

    def confine(self) -> None:
        """Become the user, and drop privileges."""
        calls.die_with_parent(signal.SIGKILL)
        if self.owner is not None:
            os.setgroups([])
            os.setresgid(self.owner, self.owner, self.owner)
            os.setresuid(self.owner, self.owner, self.owner)
            calls.die_with_parent(signal.SIGKILL)
        if self._bounded:
            calls.drop_capabilities()
            landlock.restrict(
                [f"/{name}" for name in (*rootfs.SYSTEM_DIRECTORIES, *rootfs.SYSTEM_FILES)] + self._read_only,
                [self.directory],
                [f"/dev/{name}" for name in rootfs.DEVICES],
            )
            seccomp.install_filter(seccomp.build_filter(platform.machine(), network=False))

    def kill_all(self) -> None:
        """End all processes started from here, even detached ones."""
        tree.kill_all_below(os.getpid())

    def task_limit(self, wanted: int) -> int:
        """The kernel counts all threads of a user; a user of its own has no others."""
        return wanted if self.owner is not None else wanted + tree.tasks_of_user(os.getuid())

    def leave(self) -> None:
        """Remove the working directory, even if the program has removed permissions."""
        remove_tree(self.directory)


def remove_tree(directory: str) -> None:
    """Remove a directory in which no process is left, even without permissions, or with unbounded depth."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(directory, ignore_errors=True)
    if os.path.lexists(directory):
        for command in (["/bin/chmod", "-R", "u+rwx", "--", directory], ["/bin/rm", "-rf", "--", directory]):
            os.waitpid(os.posix_spawn(command[0], command, {}), 0)


def _kill_everyone() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
