"""Landlock: a process drops access to the file system, and more, without any privilege."""

import ctypes
import os
import struct
from collections.abc import Iterable

from rollgym.sandbox.kernel.calls import PR_SET_NO_NEW_PRIVS, KernelError, prctl

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_ALL_OF_VERSION_1 = (1 << 13) - 1
# The rights that apply to files that are not directories; rules about single files must name no others.
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
_BIND_AND_CONNECT_TCP = 3
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_NETWORK_VERSION, _SCOPE_VERSION = 4, 6

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """Return the version of the kernel's interface; 0 if the kernel has none."""
    found: int = _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(1))
    return max(0, found)


def scopes_signals() -> bool:
    """Whether signals to others can be given up, too."""
    return version() >= _SCOPE_VERSION


def restrict(read_only: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Give up all files but these, TCP, abstract sockets and signals to others, as far as the kernel knows how.

    Args:
        read_only: Files and directories that can be read and executed.
        writable: Directories with which everything can be done but making devices.
        devices: Files that can be read and written.

    Raises:
        KernelError: If the kernel refuses.
    """
    known = version()
    handled = _ALL_OF_VERSION_1
    for since, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEVICE)):
        if known >= since:
            handled |= right
    attributes = struct.pack("=Q", handled)
    if known >= _NETWORK_VERSION:
        attributes += struct.pack("=Q", _BIND_AND_CONNECT_TCP)
    if known >= _SCOPE_VERSION:
        attributes += struct.pack("=Q", _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS)
    rules = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    make_device = (1 << 6) | (1 << 11)
    try:
        for path in read_only:
            _allow(rules, path, _READ & handled)
        for path in writable:
            _allow(rules, path, handled & ~make_device & ~_IOCTL_DEVICE)
        for path in devices:
            _allow(rules, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        _call(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rights = rights if os.path.isdir(path) else rights & _OF_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        _call(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise KernelError(code, f"landlock: {os.strerror(code)}")
    return result
