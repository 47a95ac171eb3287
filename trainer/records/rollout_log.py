"""The rollout log: the answers to running episodes, on disk before they are returned (write-ahead).

A folder of numbered files. Each process begins a file of its own, and a new one after every checkpoint; a file is
deleted when all tasks in it are settled. Entries have a length and a checksum. A process may be killed at any moment:
an incomplete last entry is skipped, and any other unreadable entry costs only the episodes that it belongs to, which
restart.
"""

import asyncio
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import msgpack

from rollgym.trainer.core.run_files import WriteError, sync_to_disk, write_errors

ROLLOUT_LOG_FOLDER = "rollout_log"
"""The log's name in a run's directory."""

_MAGIC = b"rollgym rollout log 1\n"
_FRAME = struct.Struct("<II")
_LARGEST_FILE = 64 * 2**20


class EpisodeKey(NamedTuple):
    """Names one attempt at one episode."""

    task: int
    member: int
    attempt: int


class Entry(NamedTuple):
    """One thing that an episode was answered.

    Attributes:
        kind: Its type; the log does not interpret it.
        key: The episode.
        fields: Values that msgpack can encode.
    """

    kind: str
    key: EpisodeKey
    fields: tuple[Any, ...]


class RolloutLog:
    """Appends entries to the newest file of a folder, and deletes files that are no longer needed.

    Args:
        folder: Contains the files.
        durable: Whether `commit` waits until the disk has what was appended, so that it outlives the machine's end;
            otherwise it outlives the process's.
        say: Called with a message for each unreadable entry.
    """

    def __init__(self, folder: Path, *, durable: bool, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._durable = durable
        self._say = say
        self._tasks: dict[Path, set[int]] = {}
        self._descriptor: int | None = None
        self._path = folder
        self._size = 0
        self._next = 1 + max((int(path.stem) for path in self._files()), default=0)
        self._syncing: asyncio.Task[None] | None = None
        self._settled: Callable[[int], bool] = lambda _: False
        self.bytes_written = 0

    def read(self) -> Iterator[Entry]:
        """Yield the entries of earlier processes, in the order in which they were written.

        Tasks that are settled meanwhile are skipped (see `settle`).
        """
        for path in self._files():
            tasks = self._tasks.setdefault(path, set())
            for entry in self._entries(path):
                if not self._settled(entry.key.task):
                    tasks.add(entry.key.task)
                    yield entry

    def append(self, entry: Entry) -> None:
        """Hand an entry to the operating system: from then on it outlives this process.

        Raises:
            WriteError: If the disk is full, or does not take it for another reason.
        """
        content = msgpack.packb([entry.kind, *entry.key, *entry.fields], unicode_errors="surrogatepass")
        frame = _FRAME.pack(len(content), crc32(content)) + content
        if self._descriptor is None or self._size > _LARGEST_FILE:
            self._begin_file()
        assert self._descriptor is not None
        with write_errors(self._path):
            try:
                _write_all(self._descriptor, frame)
            except OSError:
                with suppress(OSError):  # a reader skips half an entry, too
                    os.ftruncate(self._descriptor, self._size)
                raise
        self._size += len(frame)
        self.bytes_written += len(frame)
        self._tasks[self._path].add(entry.key.task)

    async def commit(self) -> None:
        """Return when what was appended is as safe as was asked for.

        Raises:
            WriteError: If the disk fails.
        """
        if not self._durable or self._descriptor is None:
            return
        descriptor, path = self._descriptor, self._path
        if self._syncing is not None:  # it may have begun before the entry was there
            with suppress(WriteError):
                await asyncio.shield(self._syncing)
        if self._descriptor != descriptor or self._path != path:
            # A checkpoint has closed the file meanwhile.
            await asyncio.to_thread(_sync_if_there, path)
            return
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.get_running_loop().create_task(self._sync(descriptor))
        await asyncio.shield(self._syncing)

    def settle(self, next_task: int, untrained: Iterable[int]) -> Callable[[], None]:
        """Note what a checkpoint holds: files can go in which every task was trained or dropped before it.

        Entries to come are of later tasks, and belong to another file.

        Args:
            next_task: First task that the checkpoint had never admitted.
            untrained: Tasks that it had admitted and not trained.

        Returns:
            What is left to do on the disk: bring the newest file to it, delete those that can go. It may be called in
            a thread, while entries are appended. It raises `WriteError` if the disk fails.
        """
        waiting = frozenset(untrained)
        self._settled = lambda task: task < next_task and task not in waiting
        gone = []
        for path, tasks in list(self._tasks.items()):
            tasks -= {task for task in tasks if self._settled(task)}
            if not tasks:
                del self._tasks[path]
                gone.append(path)
        finish = self._finished()

        def work() -> None:
            finish()
            for path in gone:
                with write_errors(path):
                    path.unlink(missing_ok=True)

        return work

    def close(self) -> None:
        """Close the newest file; another entry begins another one."""
        self._finished()()

    def _finished(self) -> Callable[[], None]:
        """Let go of the newest file, and return what brings it to the disk and closes it."""
        if self._descriptor is None:
            return lambda: None
        descriptor, path, self._descriptor = self._descriptor, self._path, None
        syncing = self._syncing is not None and not self._syncing.done()
        if syncing and self._syncing is not None:
            self._syncing.add_done_callback(lambda _: os.close(descriptor))
        # A handle of its own, since the other may be closed once the event loop continues.
        held = os.dup(descriptor) if syncing else descriptor

        def work() -> None:
            try:
                if self._durable:
                    with write_errors(path):
                        os.fdatasync(held)
            finally:
                os.close(held)

        return work

    def _files(self) -> list[Path]:
        numbered = [
            path for path in self._folder.glob("*.log") if path.stem.isdecimal() and path.stem.isascii()
        ]
        return sorted(numbered, key=lambda path: int(path.stem))

    async def _sync(self, descriptor: int) -> None:
        with write_errors(self._path):
            await asyncio.to_thread(os.fdatasync, descriptor)

    def _begin_file(self) -> None:
        self.close()
        self._path = self._folder / f"{self._next:06d}.log"
        self._next += 1
        with write_errors(self._path):
            self._folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
            self._tasks[self._path] = set()
            _write_all(self._descriptor, _MAGIC)
            if self._durable:
                sync_to_disk(self._folder)
        self._size = len(_MAGIC)

    def _entries(self, path: Path) -> Iterator[Entry]:
        content = path.read_bytes()
        if not content.startswith(_MAGIC):
            if not _MAGIC.startswith(content):
                self._say(f"{path} is no rollout log of this release: it is not read")
            return
        offset = len(_MAGIC)
        while offset + _FRAME.size <= len(content):
            length, checksum = _FRAME.unpack_from(content, offset)
            begin = offset + _FRAME.size
            if begin + length > len(content):
                break  # its process was killed while it wrote this
            entry = _entry(content[begin : begin + length], checksum)
            if entry is None:
                self._say(
                    f"{path} is damaged at byte {offset}: what is behind is not read, but sampled again"
                )
                break
            yield entry
            offset = begin + length


def _entry(content: bytes, checksum: int) -> Entry | None:
    if crc32(content) != checksum:
        return None
    try:
        kind, task, member, attempt, *fields = msgpack.unpackb(
            content, unicode_errors="surrogatepass", strict_map_key=False
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if not isinstance(kind, str) or not all(type(each) is int for each in (task, member, attempt)):
        return None
    return Entry(kind, EpisodeKey(task, member, attempt), tuple(fields))


def _sync_if_there(path: Path) -> None:
    """Wait until a file is on disk; a file that was deleted meanwhile is no longer needed.

    Raises:
        WriteError: If the disk fails.
    """
    with write_errors(path), suppress(FileNotFoundError):
        sync_to_disk(path)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
