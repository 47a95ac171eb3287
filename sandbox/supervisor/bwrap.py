"""The command line of bubblewrap, and the needs of the first process inside."""

import functools
import importlib.util
import io
import marshal
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from rollgym.sandbox.supervisor import rootfs
from rollgym.sandbox.supervisor.order import Order

PROGRAM = "bwrap"
CODE = "/run/rollgym.zip"
# The system's Python starts it: the server's interpreter may be readable for the server only.
_START = f"import sys; sys.path.insert(0, {CODE!r}); from rollgym.sandbox.supervisor.init import main; main()"
_PACKAGES = ("", "core", "kernel", "supervisor")
_UNCHECKED = (1).to_bytes(4, "little")
_SHARED_MEMORY_MB = 8
_MIB = 1 << 20


def path() -> str | None:
    """Return the path of the installed bubblewrap."""
    return shutil.which(PROGRAM, path="/usr/local/bin:/usr/bin:/bin")


@functools.cache
def inner_code() -> bytes:
    """Pack our own modules: the directory they lie in may be closed to the user that a run is made for."""
    import zipfile  # As heavy as all else that a launcher imports, and for this back-end alone.

    package = Path(__file__).resolve().parents[1]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rollgym/__init__.py", b"")
        for name in _PACKAGES:
            for source in sorted((package / name).glob("*.py")):
                inside = f"rollgym/sandbox/{name}/{source.name}".replace("//", "/")
                archive.writestr(inside, source.read_bytes())
                # Compiled beforehand for this version of Python; another one takes the source.
                code = marshal.dumps(compile(source.read_bytes(), inside, "exec", dont_inherit=True))
                archive.writestr(f"{inside}c", importlib.util.MAGIC_NUMBER + _UNCHECKED + bytes(8) + code)
    return packed.getvalue()


def memory_file(content: bytes) -> int:
    """Return a descriptor of a file in memory, at its beginning."""
    descriptor = os.memfd_create("rollgym")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def command_line(order: Order, shown: Mapping[str, str], data: Mapping[str, int], channel: int) -> list[str]:
    """Return bubblewrap's arguments.

    Args:
        order: The run.
        shown: The source of each path that is shown besides the system's programs.
        data: Descriptors of the contents of files, by their paths inside.
        channel: The descriptor of the channel to the monitor.
    """
    arguments = [path() or PROGRAM, "--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1"]
    arguments += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--clearenv", "--new-session"]
    arguments += ["--die-with-parent", "--cap-drop", "ALL"]
    for name in rootfs.SYSTEM_DIRECTORIES:
        source = f"/{name}"
        if os.path.islink(source):
            arguments += ["--symlink", os.readlink(source), source]
        elif os.path.isdir(source):
            arguments += ["--ro-bind", source, source]
    for source in (f"/{name}" for name in rootfs.SYSTEM_FILES):
        arguments += ["--ro-bind-try", source, source]
    arguments += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
    arguments += ["--size", str(_SHARED_MEMORY_MB * _MIB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    arguments += ["--size", str(order.limits.disk_mb * _MIB), "--tmpfs", order.directory]
    arguments += ["--dir", f"{order.directory}/.tmp", "--symlink", f"{order.directory}/.tmp", "/tmp"]
    for wanted, source in shown.items():  # which may lie below the working directory's name
        inside = (
            f"{order.directory}/.tmp{wanted.removeprefix('/tmp')}" if wanted.startswith("/tmp/") else wanted
        )
        arguments += ["--ro-bind-try", source, inside]
    for name, descriptor in data.items():
        arguments += ["--perms", "0444", "--ro-bind-data", str(descriptor), name]
    return [*arguments, "--remount-ro", "/", "/usr/bin/python3", "-I", "-S", "-c", _START, str(channel)]
