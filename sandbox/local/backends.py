"""The local sandboxes, with one base class: how each confines a run, what it claims, and the remedy if it fails."""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rollgym.sandbox.core.base import Guarantees, SandboxUnavailableError
from rollgym.sandbox.kernel import calls, landlock, seccomp
from rollgym.sandbox.local.supervised import SupervisedSandbox
from rollgym.sandbox.supervisor import bwrap


class NamespaceSandbox(SupervisedSandbox):
    """Runs each program in namespaces of its own, on a file system in memory, behind a filter of system calls."""

    name = "namespaces"
    confinement: ClassVar[str] = "namespaces"
    claims = Guarantees(
        backend="namespaces",
        level="namespaces",
        files=True,
        network=True,
        processes=True,
        privileges=True,
        system_calls=True,
        memory="watched",
        disk=True,
    )

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        return (
            "It needs Linux 5.12 with user namespaces: on Ubuntu set the sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0 or install bubblewrap with its AppArmor profile; "
            "on Debian kernel.unprivileged_userns_clone=1; in a container allow unshare and mount in its seccomp "
            "profile (docs/sandbox.md)"
        )

    def _check(self) -> None:
        check_linux(self.name)


def check_linux(name: str) -> None:
    """Refuse on machines whose kernel we do not speak to.

    Raises:
        SandboxUnavailableError: With the remedy.
    """
    if sys.platform != "linux" or not (calls.supported_machine() and seccomp.can_filter()):
        raise SandboxUnavailableError(
            f"{name} needs Linux on x86_64 or aarch64. Use the back-end docker or remote"
        )


_REMEDY = "Install it: apt-get install bubblewrap"


class BubblewrapSandbox(SupervisedSandbox):
    """Runs each program in namespaces made by `bwrap`, behind our own filter of system calls."""

    name = "bubblewrap"
    confinement: ClassVar[str] = "bubblewrap"
    claims = replace(NamespaceSandbox.claims, backend="bubblewrap")

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        return (
            "It needs user namespaces for /usr/bin/bwrap: on Ubuntu load the AppArmor profile "
            "bwrap-userns-restrict; in a container allow unshare and mount in its seccomp profile (docs/sandbox.md)"
        )

    def _check(self) -> None:
        check_linux(self.name)
        if bwrap.path() is None:
            raise SandboxUnavailableError(f"{self.name}: there is no program {bwrap.PROGRAM}. {_REMEDY}")


class HostDirectorySandbox(SupervisedSandbox):
    """A back-end whose programs work in a new directory of the host.

    Args:
        scratch: The parent of these directories; every user must be able to reach it. None for the usual place of
            temporary files.
        options: As for all back-ends.
    """

    def __init__(self, *, scratch: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._scratch = scratch

    def _directory(self) -> str:
        return f"{self._scratch or tempfile.gettempdir()}/rollgym-run-{os.urandom(8).hex()}"

    def _environment(self, directory: str) -> Mapping[str, str]:
        return {"TMPDIR": f"{directory}/tmp"}


class LandlockSandbox(HostDirectorySandbox):
    """Runs each program under Landlock and a filter of system calls that leaves it no sockets but Unix pairs."""

    name = "landlock"
    confinement: ClassVar[str] = "landlock"
    claims = replace(NamespaceSandbox.claims, backend="landlock", level="landlock", disk=False)

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        return (
            "It needs Linux 5.13 or newer with Landlock among the security modules (the kernel's option lsm=)"
        )

    def _check(self) -> None:
        check_linux(self.name)
        if landlock.version() == 0:
            raise SandboxUnavailableError(f"{self.name}: the kernel has no Landlock. {self.remedy('')}")
        # Before this version a program can signal other processes of its user.
        self.claims = replace(type(self).claims, processes=landlock.scopes_signals())


class UnsafeSandbox(HostDirectorySandbox):
    """Runs each program as the server's own user, with limits of time, memory and file size. Used by name only."""

    name = "unsafe"
    confinement: ClassVar[str] = "unsafe"
    claims = Guarantees(
        backend="unsafe",
        level="none",
        files=False,
        network=False,
        processes=False,
        privileges=False,
        system_calls=False,
        memory="watched",
        disk=False,
    )

    def remedy(self, reason: str) -> str:
        """Return what an operator can do if the back-end fails for this reason."""
        return "It needs no more than Linux and Python"

    def _check(self) -> None:
        if not os.path.isdir("/proc/self"):
            raise SandboxUnavailableError(
                f"{self.name} needs Linux with /proc. Use the back-end docker or remote"
            )
