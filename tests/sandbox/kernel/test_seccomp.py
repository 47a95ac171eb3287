"""The filter of system calls, carried out by hand for machines that the tests do not run on."""

import errno
import struct

import pytest

from rollgym.sandbox.kernel.seccomp import build_filter

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Of calls that every program makes, and of some that none may make.
_NEEDED = {
    "x86_64": {
        "read": 0,
        "execve": 59,
        "openat": 257,
        "wait4": 61,
        "prlimit64": 302,
        "getrandom": 318,
        "rseq": 334,
    },
    "aarch64": {
        "read": 63,
        "execve": 221,
        "openat": 56,
        "wait4": 260,
        "prlimit64": 261,
        "getrandom": 278,
        "rseq": 293,
    },
}
_REFUSED = {
    "x86_64": {"ptrace": 101, "mount": 165, "bpf": 321, "keyctl": 250, "memfd_create": 319, "unshare": 272},
    "aarch64": {"ptrace": 117, "mount": 40, "bpf": 280, "keyctl": 219, "memfd_create": 279, "unshare": 97},
}
# Calls on others, whose first argument (and second, of the last) is 0 where they are on the caller.
_FOR_ITSELF = {"x86_64": (302, 203, 314, 142, 144, 141), "aarch64": (261, 122, 274, 118, 119, 140)}
_CLONE = {"x86_64": 56, "aarch64": 220}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_IOCTL = {"x86_64": 16, "aarch64": 29}


def decide(packed: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Carry out a filter as the kernel does."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, architecture, 0, *padded)
    program = list(struct.iter_unpack("=HBBI", packed))
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[
                code
            ]
            position += if_true if holds else if_false


@pytest.mark.parametrize("machine", _ARCHITECTURES)
def test_each_machine_allows_what_programs_need_and_refuses_the_rest(machine: str) -> None:
    packed, architecture = build_filter(machine), _ARCHITECTURES[machine]
    for number in _NEEDED[machine].values():
        assert decide(packed, architecture, number) == _ALLOW
    for number in (*_REFUSED[machine].values(), 425, 426, 427, 428, 430, 447):
        assert decide(packed, architecture, number) == _ERRNO | errno.EPERM
    for number in (435, 451, 600, 0x3FFFFFFF):  # clone3, and what came later
        assert decide(packed, architecture, number) == _ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", _ARCHITECTURES)
def test_a_program_sets_limits_of_its_own_only(machine: str) -> None:
    packed, architecture = build_filter(machine), _ARCHITECTURES[machine]
    for number in _FOR_ITSELF[machine]:
        assert decide(packed, architecture, number, 0, 0) == _ALLOW
        assert decide(packed, architecture, number, 7, 0) == _ERRNO | errno.EPERM
    *_, set_priority = _FOR_ITSELF[machine]
    assert decide(packed, architecture, set_priority, 0, 7) == _ERRNO | errno.EPERM


@pytest.mark.parametrize("machine", _ARCHITECTURES)
def test_arguments_are_looked_at(machine: str) -> None:
    packed, architecture = build_filter(machine), _ARCHITECTURES[machine]
    ordinary_fork, threads = 0x01200011, 0x003D0F00
    for flags in (ordinary_fork, threads):
        assert decide(packed, architecture, _CLONE[machine], flags) == _ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(packed, architecture, _CLONE[machine], ordinary_fork | flag) == _ERRNO | errno.EPERM
    for family in (1, 2, 10):
        assert decide(packed, architecture, _SOCKET[machine], family, 1) == _ALLOW
    for family in (0, 15, 17, 31, 38, 40, 44):
        assert decide(packed, architecture, _SOCKET[machine], family, 1) == _ERRNO | errno.EAFNOSUPPORT
    assert decide(packed, architecture, _SOCKET[machine], 16, 3, 0) == _ALLOW
    assert decide(packed, architecture, _SOCKET[machine], 16, 3, 9) == _ERRNO | errno.EAFNOSUPPORT
    assert decide(packed, architecture, _IOCTL[machine], 0, 0x5401) == _ALLOW
    assert decide(packed, architecture, _IOCTL[machine], 0, 0x5412) == _ERRNO | errno.EPERM


def test_without_a_network_namespace_there_are_no_sockets_but_pairs() -> None:
    packed = build_filter("x86_64", network=False)
    for family in (1, 2, 10, 16):
        assert decide(packed, _ARCHITECTURES["x86_64"], 41, family, 1) == _ERRNO | errno.EAFNOSUPPORT
    assert decide(packed, _ARCHITECTURES["x86_64"], 53, 1, 1) == _ALLOW


def test_calls_of_other_architectures_end_the_program() -> None:
    packed = build_filter("x86_64")
    assert decide(packed, 0x40000003, 4) == _KILL
    assert decide(packed, _ARCHITECTURES["x86_64"], 0x40000000 | 39) == _KILL
    assert decide(build_filter("aarch64"), _ARCHITECTURES["x86_64"], 63) == _KILL
