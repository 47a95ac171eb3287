"""The back-end of bubblewrap: namespaces by a program that a distribution may allow what it denies to others."""

from dataclasses import replace
from typing import ClassVar

from sandbox.core.base import SandboxUnavailableError
from sandbox.local.namespaces import NamespaceSandbox, check_linux
from sandbox.local.supervised import SupervisedSandbox
from sandbox.supervisor import bwrap
from sandbox.supervisor.order import Confinement

_REMEDY = "Install it: apt-get install bubblewrap"


class BubblewrapSandbox(SupervisedSandbox):
    """Runs each program in namespaces made by `bwrap`, behind our own filter of system calls."""

    name = "bubblewrap"
    confinement: ClassVar[Confinement] = "bubblewrap"
    claims = replace(NamespaceSandbox.claims, backend="bubblewrap")

    def remedy(self, reason: str) -> str:
        """Return what an operator can do where it does not work for this reason."""
        return (
            "It needs user namespaces for /usr/bin/bwrap: on Ubuntu load the AppArmor profile "
            "bwrap-userns-restrict; in a container allow unshare and mount in its seccomp profile (docs/sandbox.md)"
        )

    def _check(self) -> None:
        check_linux(self.name)
        if bwrap.path() is None:
            raise SandboxUnavailableError(f"{self.name}: there is no program {bwrap.PROGRAM}. {_REMEDY}")
