"""System calls that Python's standard library does not have (some came with 3.12, which is not required)."""

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47

_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 40
_SIGCHLD = 17
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442
# (clone, pivot_root) by machine; the newer calls above have one number on all machines.
_NUMBERS = {"x86_64": (56, 155), "aarch64": (220, 41)}

_libc = ctypes.CDLL(None, use_errno=True)
# This one holds the interpreter's lock during a call, so that a child finds it held by its only thread.
_locked_libc = ctypes.PyDLL(None, use_errno=True)


class KernelError(OSError):
    """A system call failed; the text names the call and its target."""


def supported_machine() -> bool:
    """Whether the numbers of the system calls of this machine are known here."""
    return platform.machine() in _NUMBERS


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise KernelError(code, f"{what}: {os.strerror(code)}")
    return result


def clone(flags: int) -> int:
    """Fork into new namespaces; 0 in the child. Only for a process with one thread."""
    number, zero = _NUMBERS[platform.machine()][0], ctypes.c_long(0)
    arguments = (ctypes.c_long(number), ctypes.c_ulong(flags | _SIGCHLD), zero, zero, zero, zero)
    # As `os.fork` does: since Python 3.13 the interpreter takes locks here that it gives back in both processes.
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    result = _locked_libc.syscall(*arguments)
    if result == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return _check(result, "clone")


def unshare(flags: int) -> None:
    """Leave the namespaces that are named for new ones."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system; see `mount(2)`."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {kind or source} on {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only, without devices and set-uid programs."""
    attributes = struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(_AT_RECURSIVE),
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    _check(result, f"mount_setattr {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """Make a mount the root."""
    number = _NUMBERS[platform.machine()][1]
    result = _libc.syscall(ctypes.c_long(number), new_root.encode(), put_old.encode())
    _check(result, "pivot_root")


def detach(target: str) -> None:
    """Unmount a file system as soon as no process uses it (a lazy unmount)."""
    _check(_libc.umount2(target.encode(), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def set_host_name(name: str) -> None:
    """Name the machine, for the current namespace."""
    _check(_libc.sethostname(name.encode(), ctypes.c_size_t(len(name))), "sethostname")


def bring_up_loopback() -> None:
    """Let the current network namespace reach itself at 127.0.0.1 and ::1; a new one does not even do that."""
    up = struct.pack("=16sH22x", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SIOCSIFFLAGS, up)


def prctl(option: int, value: int = 0) -> None:
    """Set something of the calling process."""
    arguments = [ctypes.c_ulong(number) for number in (value, 0, 0, 0)]
    _check(_libc.prctl(ctypes.c_int(option), *arguments), f"prctl {option}")


def die_with_parent(signal_number: int) -> None:
    """Get a signal when the parent dies."""
    prctl(PR_SET_PDEATHSIG, signal_number)


def drop_capabilities() -> None:
    """Give up every capability, and the way back to them: by programs with set-uid bits or file capabilities."""
    for capability in range(_LAST_CAPABILITY + 1):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3) < 0:
            break  # Not allowed without CAP_SETPCAP; then there is nothing in the other sets either.
    clear_all = 4
    _libc.prctl(PR_CAP_AMBIENT, ctypes.c_ulong(clear_all), *[ctypes.c_ulong(0)] * 3)
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, bytes(24)), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)
