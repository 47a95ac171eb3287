"""The program inside a warm sandbox: it forks for each run, so that no run waits for an interpreter to start.

It is sent as source text, and imports no module of this package. A message is a JSON head and raw bytes; the head says
how long each of these is. The child of a run leaves `serve` and continues as the program, at the end of this file.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import random
import resource
import selectors
import shutil
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

# Modules that most programs import are loaded already; the child of a run finds them in memory.
for _name in (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq",
    "io", "itertools", "math", "operator", "re", "statistics", "string", "traceback", "typing", "unittest",
):  # fmt: skip
    __import__(_name)

_PREFIX = struct.Struct("<I")
_PLACES = ("/work", "/tmp", "/dev/shm")
_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None)


@dataclass
class _Output:
    kept: bytearray = field(default_factory=bytearray)
    total: int = 0


@dataclass
class _Ended:
    status: int
    stopped_for: str | None
    used: resource.struct_rusage
    outputs: tuple[_Output, _Output]


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], list[bytes]] | None:
    """Return a message's head and bytes; None at the end."""
    prefix = stream.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size:
        return None
    head = json.loads(stream.read(_PREFIX.unpack(prefix)[0]))
    return head, [stream.read(size) for size in head["sizes"]]


def write_message(stream: BinaryIO, head: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
    """Send a message to the pool."""
    text = json.dumps({**head, "sizes": [len(blob) for blob in blobs]}).encode()
    stream.write(_PREFIX.pack(len(text)) + text + b"".join(blobs))
    stream.flush()


def serve(requests: BinaryIO, answers: BinaryIO) -> bytes:
    """Answer requests until the input ends; in the forked child, return the request whose program it must run."""
    # Programs are of the same user: without this they could read and write the memory of this process.
    _libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    _clean(
        None
    )  # The file that this process started from is in memory already, and programs could leave notes in it.
    before = _condition()
    gc.collect()
    gc.freeze()  # The collector of a child must not touch, and thereby copy, inherited memory.
    while (message := read_message(requests)) is not None:
        head, blobs = message
        directory = f"/work/{os.urandom(8).hex()}"
        os.makedirs(f"{directory}/tmp")
        for name, content in zip(head["names"], blobs[2:], strict=True):
            path = os.path.join(directory, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(content)
        pipes = [os.pipe() for _ in range(3)]
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(head, directory, pipes)
            return blobs[0]
        for descriptor in (pipes[0][0], pipes[1][1], pipes[2][1]):
            os.close(descriptor)
        ended = _watch(child, head, blobs[1], pipes, began)
        wall_seconds = time.monotonic() - began
        left_behind = _end_all()
        collected = _collect(directory, head["collect"], head["most_bytes"])
        room = os.statvfs(directory)
        clean = _clean(directory)
        facts = {
            "status": ended.status,
            "stopped_for": ended.stopped_for,
            "wall_seconds": wall_seconds,
            "cpu_seconds": ended.used.ru_utime + ended.used.ru_stime,
            "peak_bytes": ended.used.ru_maxrss << 10,
            "truncated": [output.total > len(output.kept) for output in ended.outputs],
            "disk_full": room.f_bavail == 0 or room.f_favail == 0,
            "names": list(collected),
            "spotless": clean
            and not left_behind
            and _condition() == before
            and ended.stopped_for is None
            and os.WIFEXITED(ended.status),
        }
        write_message(
            answers, facts, [*(bytes(output.kept) for output in ended.outputs), *collected.values()]
        )
    os._exit(0)


def _become(head: Mapping[str, Any], directory: str, pipes: Sequence[tuple[int, int]]) -> None:
    """Make the forked child look like an interpreter that has just started."""
    os.setsid()
    for number, descriptor in enumerate((pipes[0][0], pipes[1][1], pipes[2][1])):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 12)
    os.chdir(directory)
    _libc.prctl(_SET_DUMPABLE, 1, 0, 0, 0)
    for name, value in head["limits"].items():
        number = getattr(resource, name)
        _, ceiling = resource.getrlimit(number)
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(number, (value, value))
    os.environ.update({"HOME": directory, "TMPDIR": f"{directory}/tmp"})
    sys.argv = [f"{directory}/main.py", *head["arguments"]]
    sys.path[0] = directory
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    random.seed()


def _watch(
    child: int, head: Mapping[str, Any], data: bytes, pipes: Sequence[tuple[int, int]], began: float
) -> _Ended:
    """Move bytes until the child ends or must be ended."""
    outputs, stopped_for = (_Output(), _Output()), None
    done = os.pidfd_open(child)
    deadline = began + head["wall_seconds"]
    to_child = pipes[0][1]
    sources = {pipes[1][0]: outputs[0], pipes[2][0]: outputs[1]}
    for descriptor in (to_child, *sources):
        os.set_blocking(descriptor, False)
    with selectors.DefaultSelector() as selector:
        selector.register(done, selectors.EVENT_READ)
        selector.register(to_child, selectors.EVENT_WRITE)
        for descriptor in sources:
            selector.register(descriptor, selectors.EVENT_READ)
        running = True
        while running:
            if stopped_for is None and time.monotonic() >= deadline:
                stopped_for = "time"
            if stopped_for is None and any(output.total > head["hard_bytes"] for output in outputs):
                stopped_for = "output"
            if stopped_for is not None:
                os.kill(child, signal.SIGKILL)
            wait = max(0.0, deadline - time.monotonic()) if stopped_for is None else None
            for key, _ in selector.select(wait):
                if key.fd == done:
                    running = False
                elif key.fd == to_child:
                    data = _feed(to_child, data)
                    if not data:
                        selector.unregister(to_child)
                        os.close(to_child)
                        to_child = -1
                elif not _drain_once(key.fd, sources[key.fd], head["keep_bytes"]):
                    selector.unregister(key.fd)
    _, status, used = os.wait4(child, 0)
    for descriptor, output in sources.items():
        while output.total < head["hard_bytes"] and _drain_once(descriptor, output, head["keep_bytes"]):
            pass
    for descriptor in (done, *sources, *((to_child,) if to_child >= 0 else ())):
        os.close(descriptor)
    return _Ended(status, stopped_for, used, outputs)


def _feed(descriptor: int, data: bytes) -> bytes:
    """Write what fits and return the rest; empty if the reader has closed its side."""
    try:
        return data[os.write(descriptor, data[:65536]) :] if data else b""
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""


def _drain_once(descriptor: int, output: _Output, keep: int) -> bool:
    """Read once; False at the end, or if nothing is available."""
    try:
        data = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    output.total += len(data)
    output.kept += data[: max(0, keep - len(output.kept))]
    return bool(data)


def _end_all() -> bool:
    """Kill every other process that can be killed; say whether there was one."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _collect(directory: str, names: Sequence[str], most_bytes: int) -> dict[str, bytes]:
    """Read plain files, and nothing else."""
    found = {}
    for name in names:
        path = os.path.join(directory, name)
        inside = os.path.realpath(path) == path and path.startswith(directory + "/")
        if (
            inside
            and os.path.isfile(path)
            and os.stat(path).st_nlink == 1
            and os.path.getsize(path) <= most_bytes
        ):
            with open(path, "rb") as file:
                found[name] = file.read(most_bytes)
    return found


def _condition() -> list[Any]:
    """The state of this process and of the directories that a program could have changed for later ones."""
    limits = [
        resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
    ]
    places = [_attributes_of(place) for place in _PLACES if not os.path.islink(place)]
    return [
        *(limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0)),
        *(os.getpgid(0), places),
    ]


def _attributes_of(place: str) -> tuple[Any, ...]:
    found = os.stat(place)
    try:
        named = os.listxattr(place)
    except OSError:
        named = []
    return (found.st_mode, found.st_uid, found.st_gid, *sorted(named))


def _clean(directory: str | None) -> bool:
    """Empty every place that can be written; say whether that was possible, and only the run's own was used."""
    tidy = True
    for place in _PLACES:
        if os.path.islink(place):
            continue
        for entry in list(os.scandir(place)):
            tidy = tidy and entry.path == directory
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
            tidy = tidy and not os.path.lexists(entry.path)
        try:
            os.utime(place, ns=(0, 0))
        except PermissionError:  # It is another user's, and programs cannot set its times either.
            continue
    return tidy


def _without_caller(error: BaseException) -> BaseException:
    """Take the frame that started the program out of its traceback."""
    trace = error.__traceback__
    return error.with_traceback(trace and trace.tb_next)


def _go_on_as(source: bytes) -> None:
    """Run a program, and end as an interpreter ends, but without taking apart all that was inherited."""
    main = types.ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(source, sys.argv[0], "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if ended.code is not None and not isinstance(ended.code, int):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException as error:  # noqa: BLE001 - the boundary at which the program's code is called
        sys.excepthook(type(error), _without_caller(error), error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    os._exit(code & 0xFF)


if __name__ == "__main__":
    # Never closed by their objects: in the child of a run these numbers soon are files of the program.
    _source = serve(open(os.dup(0), "rb", closefd=False), open(os.dup(1), "wb", closefd=False))  # noqa: SIM115
    _go_on_as(_source)
