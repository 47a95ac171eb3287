"""The back-end of Linux namespaces: nothing but the standard library, no root, no daemon."""

import sys
from typing import ClassVar

from sandbox.core.base import SandboxUnavailableError
from sandbox.core.result import Guarantees
from sandbox.kernel import calls, seccomp
from sandbox.local.supervised import SupervisedSandbox
from sandbox.supervisor.order import Confinement


class NamespaceSandbox(SupervisedSandbox):
    """Runs each program in namespaces of its own, on a file system in memory, behind a filter of system calls."""

    name = "namespaces"
    confinement: ClassVar[Confinement] = "namespaces"
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
        """Return what an operator can do where it does not work for this reason."""
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
    if sys.platform != "linux" or not (calls.supported_machine() and seccomp.supported_machine()):
        raise SandboxUnavailableError(
            f"{name} needs Linux on x86_64 or aarch64. Use the back-end docker or remote"
        )
