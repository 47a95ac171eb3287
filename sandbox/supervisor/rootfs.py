"""The root file system of a sandbox: an empty one in memory, with the system's programs shown read-only."""

import contextlib
import os
from collections.abc import Iterable, Mapping

from rollgym.sandbox.kernel.calls import (
    CLONE_NEWNS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    KernelError,
    detach,
    make_read_only,
    mount,
    pivot_root,
    unshare,
)

WRITABLE = ("work", "tmp", "dev/shm")
"""The only directories that a program can write to; they share one bound."""

SYSTEM_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib64", "lib32", "libx32")
SYSTEM_FILES = ("etc/alternatives", "etc/ld.so.cache", "etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")
_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
OWN_FILES = {
    "etc/passwd": "root:x:0:0::/nonexistent:/usr/sbin/nologin\nnobody:x:65534:65534::/work:/bin/bash\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_SPARE_INODES = 96
_SPARE_KIB = 256
# The directory in which the new root is assembled: any directory without shown paths will do, since the new root covers
# it, in this mount namespace alone.
_STAGINGS = ("/tmp", "/mnt", "/media", "/srv", "/opt", "/var/tmp", "/run", "/boot")
_OLD_ROOT = "old"


def open_shown(paths: Iterable[str]) -> dict[str, int]:
    """Return descriptors of the paths to show; missing or unreadable ones are left out.

    A first process opens them while it is still the user that shows them: a folder above, such as a home, may be closed
    to the user that it becomes.
    """
    opened = {}
    for path in paths:
        with contextlib.suppress(OSError):
            opened[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    return opened


def stage(paths: list[str]) -> dict[str, str]:
    """Mount paths again where every user can reach them, for the calling process alone; return the new places by path.

    Raises:
        OSError: If the kernel refuses.
    """
    unshare(CLONE_NEWNS)
    mount("", "/", "", MS_REC | MS_PRIVATE)
    opened = open_shown(paths)
    staging = _staging(paths)
    size = f"nr_inodes={len(opened) + _SPARE_INODES},mode=755"
    mount("tmpfs", staging, "tmpfs", MS_NOSUID | MS_NODEV, size)
    places = {path: f"{staging}/{index}" for index, path in enumerate(opened)}
    for path, place in places.items():
        _show_opened(opened[path], place)
    return places


def build_root(disk_mb: int, inodes: int, read_only: Mapping[str, int]) -> None:
    """Put the new root in place of the old one, in the current mount namespace.

    Args:
        disk_mb: MiB of all writable places.
        inodes: Files in them.
        read_only: The paths to show besides the system's programs, as `open_shown` opened it; closed here.

    Raises:
        KernelError: If a mount is refused.
        OSError: If a file of the new root cannot be made.
    """
    mount("", "/", "", MS_REC | MS_PRIVATE)
    size = f"size={(disk_mb << 10) + _SPARE_KIB}k,nr_inodes={inodes + _SPARE_INODES},mode=755"
    staging = _staging(read_only)
    mount("tmpfs", staging, "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(staging)
    for name in ("etc", "proc", "dev", _OLD_ROOT, *WRITABLE):
        os.mkdir(name)
    for name in SYSTEM_DIRECTORIES:
        _show(f"/{name}", name)
    for name in SYSTEM_FILES:
        _show(f"/{name}", name)
    for path, descriptor in read_only.items():
        os.makedirs(os.path.dirname(path.lstrip("/")) or ".", exist_ok=True)
        _show_opened(descriptor, path.lstrip("/"))
    for name in DEVICES:
        _touch(f"dev/{name}")
        mount(f"/dev/{name}", f"dev/{name}", "", MS_BIND)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"dev/{name}")
    for name, text in OWN_FILES.items():
        with open(name, "w", encoding="ascii") as file:
            file.write(text)
    # If the surrounding container masks parts of /proc, the kernel refuses a new /proc; then the jail has none.
    with contextlib.suppress(KernelError):
        mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, "hidepid=2")
    for name in WRITABLE:
        mount(name, name, "", MS_BIND | MS_REC)  # what is shown may lie below
    pivot_root(".", _OLD_ROOT)
    os.chdir("/")
    detach(f"/{_OLD_ROOT}")
    os.rmdir(f"/{_OLD_ROOT}")
    mount("", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _staging(shown: Iterable[str]) -> str:
    """Return a directory that contains no shown path."""
    paths = [each for path in shown for each in (path, os.path.realpath(path))]
    for staging in _STAGINGS:
        if os.path.isdir(staging) and not any(
            path == staging or path.startswith(f"{staging}/") for path in paths
        ):
            return staging
    raise OSError(f"each of {', '.join(_STAGINGS)} is missing or holds what is shown read-only: show less")


def _show_opened(descriptor: int, target: str) -> None:
    try:
        _show(f"/proc/self/fd/{descriptor}", target)
    finally:
        os.close(descriptor)


def _show(source: str, target: str) -> None:
    """Mount a directory or a file of the host read-only; copy a link, and skip a missing path."""
    if os.path.islink(source) and os.path.dirname(source) == "/":
        os.symlink(os.readlink(source), target)
    elif os.path.isdir(source):
        os.mkdir(target)
        mount(source, target, "", MS_BIND | MS_REC)
        make_read_only(target)
    elif os.path.exists(source):
        _touch(target)
        mount(source, target, "", MS_BIND)
        make_read_only(target)


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
