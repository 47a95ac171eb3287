"""Files of programs in a container, which a program may have prepared as traps; and the kernel's counters there."""

from __future__ import annotations

import os
import re
import stat
import subprocess

WORKING_DIRECTORY = "/work"
_WRITABLE = (WORKING_DIRECTORY, "/tmp", "/dev/shm", "/dev/mqueue")


def read_plain(directory: int, path: str, limit: int) -> bytes | None:
    """The content of a plain file, if its path has no link and its size is within the limit."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    *folders, name = path.split("/")
    opened = [os.dup(directory)]
    try:
        for folder in folders:
            opened.append(os.open(folder, flags | os.O_DIRECTORY, dir_fd=opened[-1]))
        opened.append(os.open(name, flags, dir_fd=opened[-1]))
        found = os.fstat(opened[-1])
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_size > limit:
            return None
        content = b""
        while len(content) <= limit and (piece := os.read(opened[-1], limit + 1 - len(content))):
            content += piece
        return content
    except OSError:
        return None
    finally:
        for descriptor in opened:
            os.close(descriptor)


def count(paths: tuple[str, ...], name: str) -> int:
    """The kernel's counter for this container; 0 if the kernel does not offer it."""
    for path in paths:
        try:
            with open(path) as stream:
                lines = [line.split() for line in stream]
        except OSError:
            continue
        for words in lines:
            if words[:1] == [name]:
                return int(words[1])
    return 0


def shown() -> frozenset[str]:
    """The mounts below the folders that programs can write to: before the first program, the paths shown to all."""
    found = set()
    with open("/proc/self/mountinfo", errors="surrogateescape") as stream:
        for line in stream:
            path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split()[4])
            if _is_below(path):
                found.add(path)
    return frozenset(found)


def _is_below(path: str) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in _WRITABLE))


def wipe(kept: frozenset[str]) -> bool:
    """Delete all files of a program except its mounts; return whether nothing else is left."""
    if shown() != kept:
        return False  # it has moved a folder above what it was shown: nothing there must be walked through
    above = {path[:index] for path in kept for index, each in enumerate(path) if each == "/"}
    folders = [*_WRITABLE, *filter(_is_below, above)]
    stays = kept | above
    for folder in folders:
        for name in _names(folder, 0o700):
            path = os.path.join(folder, name)
            if path in stays:
                continue
            try:
                os.unlink(path)
            except OSError:
                # Trees may be deeper than Python recurses, and closed to their owner.
                for command in (["chmod", "-R", "u+rwx", "--", path], ["rm", "-rf", "--", path]):
                    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
    return all(os.path.join(folder, name) in stays for folder in folders for name in _names(folder))


def _names(folder: str, mode: int | None = None) -> list[str]:
    try:
        if mode is not None and os.stat(folder).st_uid == os.getuid():
            os.chmod(folder, mode)
        return os.listdir(folder)
    except OSError:
        return []
