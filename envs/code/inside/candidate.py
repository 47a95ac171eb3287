"""Runs what a policy has written: each request in a process of its own, forked from this one, which stays clean.

The first line of the input holds the program and its bounds, every further line one request; the answers leave by a
copy of the standard output that the program's processes do not have. Inputs only come in here. A program that takes
this process over can answer what it likes, and knows no more of what is expected than before.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NoReturn

from rollgym.envs.code.inside import objects, values

SET_DUMPABLE, SET_CHILD_SUBREAPER = 4, 36
_COMMON = (
    *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("operator", "random", "re", "statistics", "string", "typing", "hashlib", "math"),
)
_STACK_BYTES = 64 * 1024 * 1024
_CHUNK = 1 << 16
_ERROR_TAIL = 2000


class Child:
    """A process that has loaded the program, or is about to."""

    def __init__(self, server: "Server", first: dict[str, Any]) -> None:
        reads_program = "stdin" in first
        self.directory = server.new_directory() if server.setup["apart"] else ""
        wanted, self.requests = os.pipe()
        self.answers, answering = os.pipe()
        self.errors, erring = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            server.forget()
            if self.directory:
                os.chdir(self.directory)
            for descriptor in (self.requests, self.answers, self.errors):
                os.close(descriptor)
            _begin(server.setup, first, wanted, answering, erring, reads_program)
        for descriptor in (wanted, answering, erring):
            os.close(descriptor)
        for descriptor in (self.requests, self.answers, self.errors):
            os.set_blocking(descriptor, False)
        self.status: int | None = None
        self.used = 0.0

    def collect(self) -> bool:
        """See whether it has ended."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status = status
                self.used = usage.ru_utime + usage.ru_stime
        return self.status is not None

    def out_of_time(self, seconds: float) -> bool:
        """Whether it used up its processor time; the system counts in ticks, and may end it a little before."""
        ended = os.waitstatus_to_exitcode(self.status or 0)
        return ended == -signal.SIGXCPU or self.used >= seconds

    def end(self, spared: Collection[int]) -> None:
        """Kill it and what it has started, but for these."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            _, self.status, usage = os.wait4(self.pid, 0)
            self.used = usage.ru_utime + usage.ru_stime
        for descriptor in (self.requests, self.answers, self.errors):
            if descriptor >= 0:
                os.close(descriptor)
        end_orphans(spared)
        if self.directory:
            remove(self.directory)


class Server:
    """Reads requests and answers them, one after the other.

    Args:
        source: Where requests come from.
        channel: Where answers go.
    """

    def __init__(self, source: int, channel: int) -> None:
        self._source = source
        self._channel = channel
        self._lines = open(source, "rb", closefd=False)  # noqa: SIM115
        self._kept: dict[int, Child] = {}
        self._directories = 0
        self._woken, waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waking, False)
        self._waking = waking
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self.setup: dict[str, Any] = json.loads(self._lines.readline())

    def new_directory(self) -> str:
        """Return an empty directory: what one test writes is not there for the next."""
        self._directories += 1
        name = f"run-{self._directories}"
        os.mkdir(name)
        return name

    def serve(self) -> None:
        """Answer until the requests end, or too many ran out of time."""
        for line in self._lines:
            request = json.loads(line)
            in_time = self.setup["late"] < self.setup["patience"]
            answer = self._answer(request) if in_time else {"status": "given up"}
            if answer["status"] == "late":
                self._hurry()
            data = json.dumps({"id": request["id"], **answer}).encode() + b"\n"
            while data:
                data = data[os.write(self._channel, data) :]
        for number in list(self._kept):
            self._end(self._kept.pop(number))

    def _hurry(self) -> None:
        """Give less time to what follows on a request that has run out of it."""
        self.setup |= self.setup["hurried"]
        self.setup["late"] += 1

    def forget(self) -> None:
        """Let go, in a child, of all that is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for child in self._kept.values():
            for descriptor in (child.requests, child.answers, child.errors):
                if descriptor >= 0:
                    os.close(descriptor)
        for descriptor in (self._source, self._channel, self._woken, self._waking):
            os.close(descriptor)

    def _end(self, child: Child) -> None:
        child.end({each.pid for each in self._kept.values()})

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted, number = request["do"], request.get("child")
        if "end" in wanted:
            if number in self._kept:
                self._end(self._kept.pop(number))
            return {"status": "ended"}
        child = self._kept.get(number) if number is not None else None
        data = json.dumps(wanted).encode() + b"\n"
        if child is None:
            child = Child(self, wanted)
            data = wanted["stdin"].encode(errors="replace") if "stdin" in wanted else b""
        answer = self._exchange(child, data, reads_program="stdin" in wanted)
        if number is None or answer["status"] != "answered":
            self._kept.pop(number, None) if number is not None else None
            self._end(child)
            if child.out_of_time(self.setup["cpu_seconds"]):
                answer = {"status": "late"}
        else:
            self._kept[number] = child
        return answer

    def _exchange(self, child: Child, data: bytes, *, reads_program: bool) -> dict[str, Any]:
        """Write a request to a child, or its input, and read one answer, or all that it writes."""
        deadline = time.monotonic() + self.setup["wall_seconds"]
        said, complained = bytearray(), b""
        watched = select.poll()
        for descriptor in (child.answers, child.errors, self._woken):
            watched.register(descriptor, select.POLLIN)
        if data:
            watched.register(child.requests, select.POLLOUT)
        elif reads_program:
            os.close(child.requests)
            child.requests = -1
        while (left := deadline - time.monotonic()) > 0:
            ready = watched.poll(left * 1000)
            ended = child.collect()
            for descriptor, _ in ready:
                if descriptor == child.requests:
                    try:
                        data = data[os.write(descriptor, data[:_CHUNK]) :]
                    except OSError:
                        data = b""
                    if not data:
                        watched.unregister(descriptor)
                        if reads_program:
                            os.close(descriptor)
                            child.requests = -1
                elif descriptor == child.answers:
                    if not _drain(descriptor, said):
                        watched.unregister(descriptor)
                elif descriptor == child.errors:
                    part = bytearray()
                    if not _drain(descriptor, part):
                        watched.unregister(descriptor)
                    complained = (complained + part)[-_ERROR_TAIL:]
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, _CHUNK)
            if len(said) > self.setup["answer_bytes"]:
                return {"status": "flooded"}
            if not reads_program and b"\n" in said:
                return {"status": "answered", "reply": said.partition(b"\n")[0].decode(errors="replace")}
            if ended:
                # What it had written before its end may still be in the pipes; others may hold them open for ever.
                part = bytearray()
                if child.answers >= 0:
                    _drain(child.answers, said)
                _drain(child.errors, part)
                if not reads_program and b"\n" in said:
                    continue
                return {
                    "status": "ended",
                    "exit": os.waitstatus_to_exitcode(child.status or 0),
                    "output": said.decode(errors="replace") if reads_program else "",
                    "errors": (complained + part)[-_ERROR_TAIL:].decode(errors="replace"),
                }
        return {"status": "late"}


def main() -> None:
    """Serve on the standard streams."""
    source, channel = (high(os.dup(descriptor)) for descriptor in (0, 1))
    silence(0, 1)
    control(SET_CHILD_SUBREAPER, 1)
    control(SET_DUMPABLE, 0)
    server = Server(source, channel)
    program = " ".join(text for _, text in server.setup["units"])
    for name in _COMMON:
        if name in program:
            # Once here, instead of in every process.
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    server.serve()


def _drain(descriptor: int, into: bytearray) -> bool:
    """Read what is there; tell whether more may come."""
    while True:
        try:
            part = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not part:
            return False
        into += part
        if len(into) > values.MAX_CHARACTERS * 2:
            return True


# -- in the child ------------------------------------------------------------------------------------------------


def _begin(
    setup: dict[str, Any],
    first: dict[str, Any],
    wanted: int,
    answering: int,
    erring: int,
    reads_program: bool,
) -> NoReturn:
    os.setsid()
    # Graders of the field lift this bound of Python's; what a long number costs is the program's own time.
    sys.set_int_max_str_digits(0)
    # A program may look at itself, as by /dev/stdin.
    control(SET_DUMPABLE, 1)
    seconds = math.ceil(setup["cpu_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    with contextlib.suppress(ValueError, OSError):
        soft = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, _STACK_BYTES)
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    if reads_program:
        os.dup2(wanted, 0)
        os.dup2(answering, 1)
        os.dup2(erring, 2)
        for descriptor in (wanted, answering, erring):
            os.close(descriptor)
        sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        _load(setup["units"], "__main__")
        # Threads that are left are waited for, and what it has registered for its end is done, as in any program.
        sys.exit()
    os.close(erring)
    silence(2)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    _converse(setup, first, high(wanted), high(answering))


def _load(units: list[list[str]], name: str) -> types.ModuleType:
    if "random" in sys.modules:
        # Equal programs do equal things, as far as that is in our hands.
        sys.modules["random"].seed(0)
    module = types.ModuleType(name)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[name] = module
    for file, source in units:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    return module


def _converse(setup: dict[str, Any], first: dict[str, Any], wanted: int, answering: int) -> NoReturn:
    # Whatever the program replaces later: these are used.
    write, end = os.write, os._exit
    requests = open(wanted, "rb")  # noqa: SIM115

    def exchange(text: str) -> str:
        data = text.encode("ascii", "replace") + b"\n"
        while data:
            data = data[write(answering, data) :]
        line = requests.readline()
        if not line:
            end(0)
        return line.decode()

    loaded = _guarded(lambda: _load(setup["units"], setup["module"]))
    world = objects.World(loaded[1], exchange) if loaded[0] else None
    request = first
    while True:
        answer = loaded if world is None else _guarded(partial(world.do, request))
        text = answer[1] if answer[0] else json.dumps({**answer[1], "loading": world is None})
        request = json.loads(exchange(text))


def _guarded(act: Callable[[], Any]) -> tuple[bool, Any]:
    """Do what may be the program's own: the one place where whatever it raises is caught."""
    try:
        return True, act()
    except BaseException as error:  # noqa: BLE001
        return False, objects.described(error)


def silence(*descriptors: int) -> None:
    """Turn descriptors to where nothing is read and nothing kept."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nothing, descriptor)
    os.close(nothing)


def control(option: int, value: int) -> None:
    """Set a property of this process, where the system has it."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def high(descriptor: int) -> int:
    """Return a copy of a descriptor with a high number, in its place."""
    # Out of the way of programs that close or count the low ones.
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 4096)
    for number in range(limit - 1, limit - 32, -1):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(descriptor, number, inheritable=False)
            os.close(descriptor)
            return number
    return descriptor


def end_orphans(spared: Collection[int]) -> None:
    """Kill what programs have started beside themselves: it is handed to this process when its parent ends.

    Args:
        spared: Children that are kept.
    """
    while True:
        if not spared:
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # The common case, without a look at every process.
                return
        orphans = [pid for pid in _children() if pid not in spared]
        if not orphans:
            return
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def remove(directory: str) -> None:
    """Remove a directory with whatever is in it."""
    try:
        os.rmdir(directory)
    except OSError:
        # Only here: the import takes long, and hardly any program leaves files.
        import shutil

        shutil.rmtree(directory, ignore_errors=True)


def _children() -> list[int]:
    mine = os.getpid()
    found: list[int] = []
    try:
        names = os.listdir("/proc")
    except OSError:
        # Then the end of the run ends them.
        return found
    for name in names:
        if name.isdigit():
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
            ):
                if int(file.read().rpartition(")")[2].split()[1]) == mine:
                    found.append(int(name))
    return found
