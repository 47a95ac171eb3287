"""No sandbox: limits of resources only. It protects from accidents, not from programs that mean harm."""

import os
from typing import ClassVar

from sandbox.core.base import SandboxUnavailableError
from sandbox.core.result import Guarantees
from sandbox.local.landlock import HostDirectorySandbox
from sandbox.supervisor.order import Confinement


class UnsafeSandbox(HostDirectorySandbox):
    """Runs each program as the server's own user, with limits of time, memory and file size. Used by name only."""

    name = "unsafe"
    confinement: ClassVar[Confinement] = "unsafe"
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
        """Return what an operator can do where it does not work for this reason."""
        return "It needs no more than Linux and Python"

    def _check(self) -> None:
        if not os.path.isdir("/proc/self"):
            raise SandboxUnavailableError(
                f"{self.name} needs Linux with /proc. Use the back-end docker or remote"
            )
