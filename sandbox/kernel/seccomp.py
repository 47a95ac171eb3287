"""The filter of system calls, packed by hand: no library is needed for a list that only ever refuses."""

import ctypes
import errno
import functools
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from rollgym.sandbox.kernel.calls import PR_SET_NO_NEW_PRIVS, KernelError, prctl

# Of each call, its number on x86_64 and on aarch64; None if that machine has no such call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Work that the kernel does for a program later, past every check at the time of the call.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "ioprio_set": (251, 30),
    # Keys outlive the run.
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    # Namespaces and mounts.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # The machine.
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "personality": (135, 92),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Old interfaces of x86.
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
}
# Allowed if these arguments are 0, which means the calling process: the process that starts programs may have the same
# user, and would pass limits that it was given on to later programs. First the numbers as above, then the arguments.
FOR_ITSELF: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "prlimit64": (302, 261, (0,)),
    "sched_setaffinity": (203, 122, (0,)),
    "sched_setattr": (314, 274, (0,)),
    "sched_setparam": (142, 118, (0,)),
    "sched_setscheduler": (144, 119, (0,)),
    "setpriority": (141, 140, (0, 1)),
}
# Newer system calls are unknown to the filter, and the C library works without them.
_LAST_KNOWN = 450

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_X32_BIT = 0x40000000
# All but the bit of a new time namespace, which means something else to `clone`.
_NAMESPACE_FLAGS = 0x7E020000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2

Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Machine:
    """The parts of a filter that differ between machines."""

    audit_architecture: int
    column: int
    clone: int
    clone3: int
    socket: int
    socketpair: int
    ioctl: int


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 0, clone=56, clone3=435, socket=41, socketpair=53, ioctl=16),
    "aarch64": _Machine(0xC00000B7, 1, clone=220, clone3=435, socket=198, socketpair=199, ioctl=29),
}


@functools.cache
def build_filter(machine: str, *, network: bool = True) -> bytes:
    """Pack the filter for a machine.

    Args:
        machine: As `platform.machine()` says it: `x86_64` or `aarch64`.
        network: Whether sockets may be made; without a network namespace around the program, only pairs are safe.

    Raises:
        KeyError: If the machine is neither.
    """
    numbers = _MACHINES[machine]
    # A Unix socket reaches services by their path, past every rule about files; a socket pair reaches no other process.
    families = [_AF_UNIX, _AF_INET, _AF_INET6] if network else []
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, numbers.audit_architecture),
        _return(_KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT), _return(_KILL_PROCESS)]
    program += [(_JUMP_GREATER_EQUAL, 0, 1, _LAST_KNOWN + 1), _refuse(errno.ENOSYS)]
    # The C library falls back to the old `clone` if this one does not exist, and the filter can see the flags of that
    # one.
    program += _when(numbers.clone3, [_refuse(errno.ENOSYS)])
    program += _when(
        numbers.clone,
        [*_load_argument(0), (_JUMP_ANY_BIT, 0, 1, _NAMESPACE_FLAGS), _refuse(errno.EPERM), _return(_ALLOW)],
    )
    program += _when(numbers.ioctl, [*_load_argument(1), *_unless_any([_TIOCSTI, _TIOCLINUX])])
    program += _when(numbers.socket, _socket_rules(families, netlink=network))
    program += _when(numbers.socketpair, _socket_rules([_AF_UNIX], netlink=False))
    for x86_64, aarch64, arguments in FOR_ITSELF.values():
        program += _when((x86_64, aarch64)[numbers.column], _unless_others(arguments))
    for pair in REFUSED.values():
        number = pair[numbers.column]
        if number is not None:
            program += [(_JUMP_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    program.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def install_filter(packed: bytes) -> None:
    """Put a filter on the calling process and all that it will start; it cannot be taken off.

    Raises:
        KernelError: If the kernel refuses.
    """

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    memory = ctypes.create_string_buffer(packed, len(packed))
    program = Program(len(packed) // 8, ctypes.addressof(memory))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_ulong(ctypes.addressof(program))
    if libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), pointer, *[ctypes.c_ulong(0)] * 2) < 0:
        raise KernelError(ctypes.get_errno(), "the kernel refuses the filter of system calls")


def can_filter() -> bool:
    """Whether a filter can be built for this machine."""
    return platform.machine() in _MACHINES


def _return(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)


def _refuse(code: int) -> Instruction:
    return _return(_ERRNO | code)


def _load_argument(index: int) -> list[Instruction]:
    """Load the low half of an argument: all that is compared here are ints."""
    return [(_LOAD, 0, 0, _ARGUMENTS + 8 * index)]


def _when(number: int, body: list[Instruction]) -> list[Instruction]:
    """Run instructions, which must end in a decision, for one call; go past them for others."""
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _unless_any(values: Iterable[int]) -> list[Instruction]:
    """Refuse these values, and allow all others."""
    body: list[Instruction] = []
    for value in values:
        body += [(_JUMP_EQUAL, 0, 1, value), _refuse(errno.EPERM)]
    return [*body, _return(_ALLOW)]


def _unless_others(arguments: Iterable[int]) -> list[Instruction]:
    """Allow a call whose arguments are 0 here."""
    body: list[Instruction] = []
    for index in arguments:
        body += [*_load_argument(index), (_JUMP_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
    return [*body, _return(_ALLOW)]


def _socket_rules(families: Iterable[int], *, netlink: bool) -> list[Instruction]:
    """Allow these families, and of netlink the questions about routes, which listing interfaces takes."""
    body = _load_argument(0)
    for family in families:
        body += [(_JUMP_EQUAL, 0, 1, family), _return(_ALLOW)]
    if netlink:
        body += [
            (_JUMP_EQUAL, 0, 3, _AF_NETLINK),
            *_load_argument(2),
            (_JUMP_EQUAL, 0, 1, 0),
            _return(_ALLOW),
        ]
    return [*body, _refuse(errno.EAFNOSUPPORT)]
