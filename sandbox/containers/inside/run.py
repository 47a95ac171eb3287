"""One program in a container, from its start until nothing of it is left."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from rollgym.sandbox.containers.inside.files import WORKING_DIRECTORY, count, read_plain
from rollgym.sandbox.containers.inside.frames import CHUNK, INPUT, OUTPUT, RESULT, STOP, Host, frame

HARD_OUTPUT_BYTES = 32 * 1024 * 1024
_UNSENT_BYTES = 1024 * 1024
_OUT_OF_MEMORY_FILES = ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events")
_PIDS_FILES = ("/sys/fs/cgroup/pids/pids.events", "/sys/fs/cgroup/pids.events")


class _Stream:
    """One of a program's two streams: the kept part, and its total size."""

    def __init__(self, descriptor: int, keep: int) -> None:
        self.descriptor = descriptor
        self.kept = bytearray()
        self.size = 0
        self.open = True
        self._keep = keep

    def read(self) -> bytes:
        """Read some; nothing at the end."""
        data = os.read(self.descriptor, CHUNK)
        self.size += len(data)
        self.kept += data[: max(0, self._keep - len(self.kept))]
        return data

    def close(self) -> None:
        """Close the descriptor of the stream."""
        self.open = False
        os.close(self.descriptor)


class ContainerRun:
    """One program, from its start until nothing of it is left."""

    def __init__(self, order: dict[str, Any], host: Host) -> None:
        self._order = order
        self._host = host
        self._is_session = bool(order["session"])
        self._status: int | None = None
        self._cause = ""
        self._cpu_seconds = 0.0
        self._peak_kb = 0
        self._input = bytearray()
        self._input_end = -1
        self._spooled = -1
        self._refuse = ""
        self._selector = selectors.DefaultSelector()

    def carry_out(self, wakeup: int) -> None:
        """Run the program, and send its outcome to the host."""
        self._directory = os.open(WORKING_DIRECTORY, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lay_files()
        except OSError as error:
            self._refuse = str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._cause = "files"
        self._out_of_memory = count(_OUT_OF_MEMORY_FILES, "oom_kill")
        self._forks_refused = count(_PIDS_FILES, "max")
        self._began = time.monotonic()
        self._ended = self._began
        if not self._refuse:
            self._start()
        if not self._refuse:
            self._attend(wakeup)
        self._report()
        self._close()

    def _lay_files(self) -> None:
        failure: OSError | None = None
        for path, size, executable in self._order["files"]:
            descriptor = -1
            try:
                parent = os.path.dirname(path)
                if parent:
                    os.makedirs(os.path.join(WORKING_DIRECTORY, parent), exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                descriptor = os.open(path, flags, 0o755 if executable else 0o644, dir_fd=self._directory)
            except OSError as error:
                failure = failure or error
            # The host's data must be read, even without room to store it.
            failure = self._spool(size, descriptor) or failure
            if descriptor >= 0:
                os.close(descriptor)
        self._spooled = os.open("/tmp", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        failure = self._spool(self._order["stdin"], self._spooled) or failure
        os.lseek(self._spooled, 0, os.SEEK_SET)
        if failure is not None:
            raise failure

    def _spool(self, size: int, descriptor: int) -> OSError | None:
        failure = None
        for piece in self._host.chunks(size):
            try:
                view = memoryview(piece)
                while descriptor >= 0 and failure is None and view:
                    view = view[os.write(descriptor, view) :]
            except OSError as error:
                failure = error
        return failure

    def _start(self) -> None:
        order = self._order
        input_start, self._input_end = os.pipe2(os.O_CLOEXEC)
        out, out_start = os.pipe2(os.O_CLOEXEC)
        err, err_start = os.pipe2(os.O_CLOEXEC)
        self._out, self._err = _Stream(out, order["keep"]), _Stream(err, order["keep"])
        try:
            process = subprocess.Popen(
                order["command"],
                stdin=input_start,
                stdout=out_start,
                stderr=err_start,
                cwd=WORKING_DIRECTORY,
                env=order["environment"],
                start_new_session=True,
                preexec_fn=self._confine,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._refuse = str(error)
            self._out.close()
            self._err.close()
            return
        finally:
            for descriptor in (input_start, out_start, err_start):
                os.close(descriptor)
        # It is reaped here with all the others.
        self._main = process.pid
        process.returncode = 0
        self._deadline = self._began + order["wall_seconds"]
        for descriptor in (self._input_end, out, err):
            os.set_blocking(descriptor, False)
        self._selector.register(out, selectors.EVENT_READ, self._out)
        self._selector.register(err, selectors.EVENT_READ, self._err)
        self._selector.register(self._input_end, selectors.EVENT_WRITE, "input")
        self._selector.register(0, selectors.EVENT_READ, "host")

    def _confine(self) -> None:
        """In the child, before it becomes the program."""
        for name, soft, hard in self._order["rlimits"]:
            resource.setrlimit(getattr(resource, name), (soft, hard))
        # Its own memory is its own again; nothing untrusted runs beside it yet.
        close_memory(False)
        with open("/proc/self/oom_score_adj", "w") as adjustment:
            adjustment.write("1000")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    def _attend(self, wakeup: int) -> None:
        """Pass on, drain, reap and count until the program and all that it has started are gone."""
        self._selector.register(wakeup, selectors.EVENT_READ, "child")
        os.set_blocking(1, False)
        # Some may have come with the order.
        self._hear()
        while self._status is None or self._out.open or self._err.open:
            self._listen_to_host()
            left = max(0.0, self._deadline - time.monotonic())
            events = self._selector.select(None if self._status is not None else left)
            for key, _ in events:
                if key.data == "child":
                    os.read(wakeup, CHUNK)
                elif key.data == "host":
                    self._host.read_some()
                    self._hear()
                elif key.data == "unsent":
                    self._host.send_some()
                elif key.data == "input":
                    self._feed()
                else:
                    self._drain(key.data)
            self._reap()
            if self._status is None and time.monotonic() >= self._deadline:
                self._end("time")
        os.set_blocking(1, True)

    def _listen_to_host(self) -> None:
        """Wait for a message of the host, for its readiness to read, or for the program's readiness for input."""
        self._watch(1, selectors.EVENT_WRITE, bool(self._host.unsent), "unsent")
        self._watch(0, selectors.EVENT_READ, len(self._input) < _UNSENT_BYTES, "host")
        if self._input_end >= 0:
            waiting = bool(self._input) or not self._is_session
            self._watch(self._input_end, selectors.EVENT_WRITE, waiting, "input")
        if self._out.open:
            # A session's output waits in the program's pipe for a host that is slow to read.
            flows = len(self._host.unsent) < _UNSENT_BYTES or self._status is not None
            self._watch(self._out.descriptor, selectors.EVENT_READ, flows, self._out)

    def _watch(self, descriptor: int, event: int, wanted: bool, data: Any) -> None:
        watched = descriptor in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(descriptor, event, data)
        elif watched and not wanted:
            self._selector.unregister(descriptor)

    def _hear(self) -> None:
        for kind, payload in self._host.frames():
            if kind == INPUT and self._input_end >= 0:
                self._input += payload
            elif kind == STOP and self._status is None:
                self._end("stopped")

    def _feed(self) -> None:
        if not self._input and not self._is_session:
            self._input += os.read(self._spooled, CHUNK)
        try:
            if self._input:
                del self._input[: os.write(self._input_end, self._input[:CHUNK])]
                return
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._input.clear()
        self._selector.unregister(self._input_end)
        os.close(self._input_end)
        self._input_end = -1

    def _drain(self, stream: _Stream) -> None:
        """Read of a stream; close it at its end."""
        try:
            data = stream.read()
        except BlockingIOError:
            return
        if not data:
            self._selector.unregister(stream.descriptor)
            stream.close()
        if self._is_session and stream is self._out and data:
            self._host.unsent += frame(OUTPUT, data)
        if stream.size > HARD_OUTPUT_BYTES and self._status is None:
            self._end("output")

    def _end(self, cause: str) -> None:
        self._cause = cause
        self._kill_all()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._note(pid, status, usage)
            if pid == self._main:
                # Its end is the end of all that it has started.
                self._kill_all()

    def _kill_all(self) -> None:
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            try:
                self._note(*os.wait4(-1, 0))
            except ChildProcessError:
                return

    def _note(self, pid: int, status: int, usage: resource.struct_rusage) -> None:
        self._cpu_seconds += usage.ru_utime + usage.ru_stime
        self._peak_kb = max(self._peak_kb, usage.ru_maxrss)
        if pid == self._main:
            self._status = status
            self._ended = time.monotonic()

    def _report(self) -> None:
        spaces = [os.statvfs(folder) for folder in (WORKING_DIRECTORY, "/tmp")]
        files = [] if self._refuse else list(self._collect())
        out, err = (b"", b"") if self._refuse else (bytes(self._out.kept), bytes(self._err.kept))
        status = self._status
        result = {
            "refused": self._refuse,
            "cause": self._cause,
            "exit_code": None if status is None or not os.WIFEXITED(status) else os.WEXITSTATUS(status),
            "signal": None if status is None or not os.WIFSIGNALED(status) else os.WTERMSIG(status),
            "out_of_memory": count(_OUT_OF_MEMORY_FILES, "oom_kill") - self._out_of_memory,
            "forks_refused": count(_PIDS_FILES, "max") - self._forks_refused,
            "disk_full": any(space.f_bavail == 0 or space.f_favail == 0 for space in spaces),
            "wall_seconds": self._ended - self._began,
            "cpu_seconds": self._cpu_seconds,
            "peak_memory_mb": self._peak_kb / 1024,
            "stdout": len(out),
            "stderr": len(err),
            "stdout_size": 0 if self._refuse else self._out.size,
            "stderr_size": 0 if self._refuse else self._err.size,
            "files": [[path, len(content)] for path, content in files],
        }
        self._host.send(frame(RESULT, json.dumps(result).encode()) + out + err)
        for _, content in files:
            self._host.send(content)

    def _close(self) -> None:
        """Close open descriptors, which would hold memory until the next program."""
        for descriptor in (self._directory, self._spooled, self._input_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._selector.close()

    def _collect(self) -> Iterator[tuple[str, bytes]]:
        for path in self._order["collect"]:
            content = read_plain(self._directory, path, self._order["collect_bytes"])
            if content is not None:
                yield path, content


_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


def close_memory(closed: bool) -> None:
    """Close the memory of this process to others of its user, or open it.

    Raises:
        OSError: If the kernel refuses.
    """
    arguments = [ctypes.c_ulong(int(not closed)), *[ctypes.c_ulong(0)] * 3]
    if _libc.prctl(ctypes.c_int(_PR_SET_DUMPABLE), *arguments) != 0:
        raise OSError(ctypes.get_errno(), "who may read this memory cannot be set")
