"""The back-end for kernels without user namespaces: a program gives up files, sockets and signals by itself."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from sandbox.core.base import SandboxUnavailableError
from sandbox.kernel import landlock
from sandbox.local.namespaces import NamespaceSandbox, check_linux
from sandbox.local.supervised import SupervisedSandbox
from sandbox.supervisor.order import Confinement


class HostDirectorySandbox(SupervisedSandbox):
    """A back-end whose programs work in a new directory of the host.

    Args:
        scratch: Where these directories are made; every user must be able to reach it. None for the usual place of
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
    confinement: ClassVar[Confinement] = "landlock"
    claims = replace(NamespaceSandbox.claims, backend="landlock", level="landlock", disk=False)

    def remedy(self, reason: str) -> str:
        """Return what an operator can do where it does not work for this reason."""
        return (
            "It needs Linux 5.13 or newer with Landlock among the security modules (the kernel's option lsm=)"
        )

    def _check(self) -> None:
        check_linux(self.name)
        if landlock.version() == 0:
            raise SandboxUnavailableError(f"{self.name}: the kernel has no Landlock. {self.remedy('')}")
        # Before this version a program can signal other processes of its user.
        self.claims = replace(type(self).claims, processes=landlock.scopes_signals())
