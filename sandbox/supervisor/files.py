"""Files that are laid into a working directory and brought back from it; the program may have put traps there."""

import contextlib
import os
import stat
from collections.abc import Iterable


def lay(directory: str, name: str, content: bytes, owner: int | None = None) -> None:
    """Write a file before anything untrusted runs.

    Raises:
        ValueError: If the name leads out of the directory.
        OSError: If the disk is full.
    """
    parts = plain_parts(name)
    path = directory
    for part in parts[:-1]:
        path = f"{path}/{part}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            if owner is not None:
                os.chown(path, owner, owner)
    descriptor = os.open(
        f"{path}/{parts[-1]}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    with open(descriptor, "wb") as file:
        file.write(content)
        if owner is not None:
            os.fchown(descriptor, owner, owner)


def collect(directory: str, names: Iterable[str], most_bytes: int) -> dict[str, bytes]:
    """Read files that the program may have written; skip files that are not plain, not its own, or too large."""
    found: dict[str, bytes] = {}
    for name in names:
        content = _read_plain(directory, name, most_bytes)
        if content is not None:
            found[name] = content
    return found


def exceeds(directory: str, most_bytes: int, most_entries: int) -> bool:
    """Whether a directory holds more than this; a program may change it at the same time."""
    waiting, used, entries = [directory], 0, 0
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for entry in found:
                    entries += 1
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if used > most_bytes or entries > most_entries:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue  # It is gone, or not readable; its contents count again when it is opened.
    return False


def plain_parts(name: str) -> list[str]:
    """Split a relative path.

    Raises:
        ValueError: If it is absolute, empty, or leads upwards.
    """
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise ValueError(f"{name!r} is not a relative path within the working directory")
    return parts


def plain_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names that are relative paths and lead nowhere upwards, each once."""
    return tuple(name for name in dict.fromkeys(names) if _is_plain(name))


def _is_plain(name: str) -> bool:
    try:
        plain_parts(name)
    except ValueError:
        return False
    return True


def _read_plain(directory: str, name: str, most_bytes: int) -> bytes | None:
    """Walk down without following a link, and read without waiting for a pipe."""
    try:
        parts = plain_parts(name)
        here = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except (ValueError, OSError):
        return None
    try:
        for part in parts[:-1]:
            below = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
            os.close(here)
            here = below
        # A path that is opened before it is known to be a plain file could be a device or a pipe, and opening acts on
        # those.
        known = os.stat(parts[-1], dir_fd=here, follow_symlinks=False)
        if not _acceptable(known, most_bytes):
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(parts[-1], flags, dir_fd=here), "rb", buffering=0) as file:
            if not _acceptable(os.fstat(file.fileno()), most_bytes):
                return None
            content = bytearray()
            while len(content) <= most_bytes and (data := file.read(1 << 16)):
                content += data
    except OSError:
        return None
    finally:
        os.close(here)
    return bytes(content) if len(content) <= most_bytes else None


def _acceptable(status: os.stat_result, most_bytes: int) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size <= most_bytes
