"""What surrounds a run, each way declared once: how its first process begins, and what that gives up."""

import platform
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from rollgym.sandbox.kernel import seccomp
from rollgym.sandbox.supervisor import bwrap
from rollgym.sandbox.supervisor.jails import Jail, NamespaceJail, PlainJail
from rollgym.sandbox.supervisor.order import Order

# Root gives each run a user of its own, from a range that nothing else uses; a container may not have it.
_FIRST_USER, _USERS = 0x70000000, 0x0FFFFFFF
_NOBODY = 65534


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """A way to surround a run.

    Attributes:
        make_ready: Makes once what every monitor inherits: the launcher calls it before the first run.
        jail: Makes what the first process puts itself into, given the run and whether we are root; None where another
            program does that and starts the first process below itself.
        own_namespaces: Whether the first process begins in namespaces of its own, with one user.
        on_host: Whether programs work in a directory of the host, and among its processes.
    """

    make_ready: Callable[[], object]
    jail: Callable[[Order, bool], Jail] | None
    own_namespaces: bool = False
    on_host: bool = False


def _namespaces(order: Order, is_root: bool) -> Jail:
    limits, read_only = order.limits, list(order.read_only)
    return NamespaceJail(take_user=is_root, disk_mb=limits.disk_mb, inodes=limits.inodes, read_only=read_only)


def _landlock(order: Order, is_root: bool) -> Jail:
    user = user_of_a_run() if is_root else None
    return PlainJail(order.directory, user, bounded=True, read_only=list(order.read_only))


def _unsafe(order: Order, is_root: bool) -> Jail:
    return PlainJail(order.directory, None, bounded=False, read_only=list(order.read_only))


def user_of_a_run() -> int:
    """Return a user that nothing else uses, or nobody where the container has no such user."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    user = _FIRST_USER + random.SystemRandom().randrange(_USERS)
    return user if any(first <= user < first + count for first, _, count in ranges) else _NOBODY


CONFINEMENTS: Mapping[str, Confinement] = MappingProxyType(
    {
        "namespaces": Confinement(
            make_ready=lambda: seccomp.build_filter(platform.machine(), network=True),
            jail=_namespaces,
            own_namespaces=True,
        ),
        "bubblewrap": Confinement(make_ready=bwrap.inner_code, jail=None),
        "landlock": Confinement(
            make_ready=lambda: seccomp.build_filter(platform.machine(), network=False),
            jail=_landlock,
            on_host=True,
        ),
        "unsafe": Confinement(make_ready=lambda: None, jail=_unsafe, on_host=True),
    }
)
"""All of them by name. A name that is not among them is an error, and never taken for one without bounds."""
