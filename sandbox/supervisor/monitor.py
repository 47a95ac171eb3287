"""One run, watched from outside: limits, streams, and an end in any case."""

import contextlib
import os
import select
import selectors
import signal
import socket
import threading
import time
from typing import Any

from rollgym.sandbox.kernel import calls
from rollgym.sandbox.supervisor import tree
from rollgym.sandbox.supervisor.cgroups import Parents
from rollgym.sandbox.supervisor.confinements import CONFINEMENTS
from rollgym.sandbox.supervisor.entering import FirstProcess, enter
from rollgym.sandbox.supervisor.files import exceeds
from rollgym.sandbox.supervisor.frames import FrameError, SupervisorMessage, receive_frame, send_frame
from rollgym.sandbox.supervisor.jails import remove_tree
from rollgym.sandbox.supervisor.order import Order, Stage
from rollgym.sandbox.supervisor.streams import CappedStream, Feed

HARD_OUTPUT_BYTES = 32 << 20
"""A program that writes more than this to one stream is ended."""

_GRACE_SECONDS = 2.0
_REMOVAL_SECONDS = 30.0
_WATCH_SECONDS = 0.05
# With a group that counts, a bound on each process is only there so that no address space is without one.
_ROOMY_ADDRESS_SPACE = 16 << 30
_SPARE_TASKS = 8
_OWN_ENTRIES = 8
_MIB = 1 << 20


class SetupError(Exception):
    """The sandbox could not be made, or broke; this says nothing about the program."""


def monitor(server: socket.socket, parents: Parents | None) -> None:
    """Carry out the one order that comes over a connection, and answer it."""
    frame = receive_frame(server)
    if frame is None:
        return
    order = Order.from_head(frame.head)
    run = _Run(server, order, frame, parents if order.cgroups else None)
    try:
        answer, blobs = run.carry_out()
    except (SetupError, FrameError, OSError, ValueError) as error:
        answer, blobs = {"error": f"{error}"}, []
    finally:
        run.end_all()
    with contextlib.suppress(OSError):  # The server may have gone.
        send_frame(server, answer, blobs)
    server.close()
    run.clean_up()


class _Run:
    def __init__(
        self, server: socket.socket, order: Order, frame: SupervisorMessage, parents: Parents | None
    ) -> None:
        self._server, self._order, self._frame, self._parents = server, order, frame, parents
        self._first: FirstProcess | None = None
        self._stopped_for: str | None = None
        self._peak_bytes = 0
        self._pids_reached = False
        self._confinement = CONFINEMENTS[order.confinement]
        if self._confinement.on_host:
            calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)

    def carry_out(self) -> tuple[dict[str, Any], list[bytes]]:
        """Run the stages; return the answer's head, with two blobs of output for each stage and the files."""
        self._first = enter(self._order, self._parents)
        stdin, *contents = self._frame.blobs
        if contents:
            self._tell({"do": "lay", "names": list(self._order.file_names)}, contents)
        stages: list[dict[str, Any]] = []
        blobs: list[bytes] = []
        for index, stage in enumerate(self._order.stages):
            last = index == len(self._order.stages) - 1
            facts, output = self._stage(stage, stdin if last else b"", last=last)
            stages.append(facts)
            blobs += output
            if facts["status"] != 0 or facts["stopped_for"] or facts["memory_exhausted"]:
                break
        names = facts.pop("names", [])
        return {"stages": stages, "names": names, "sum": self._first.group is not None}, blobs

    def end_all(self) -> None:
        """End the first process; if it has namespaces of its own, the kernel kills all their processes with it."""
        if self._first is None:
            return
        self._first.channel.close()
        if self._confinement.on_host:
            self._wait_for_first(_GRACE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first.pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Wait for the kernel, which takes its time over namespaces, and remove the remains."""
        if self._first is None:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._first.pid, 0)
        if self._confinement.on_host:  # The first process has done this, unless it was killed.
            tree.kill_all_below(os.getpid())
            remove_tree(self._order.directory)
        if self._first.group is not None:
            self._first.group.remove(patience_seconds=_REMOVAL_SECONDS)

    def _wait_for_first(self, seconds: float) -> None:
        """Let it end by itself, as it has to clean up."""
        assert self._first is not None
        descriptor = os.pidfd_open(self._first.pid)
        try:
            select.select([descriptor], [], [], seconds)
        finally:
            os.close(descriptor)

    def _tell(self, head: dict[str, Any], blobs: list[bytes] = [], descriptors: list[int] = []) -> None:  # noqa: B006
        assert self._first is not None
        # If the first process has ended, the next receive says why.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send_frame(self._first.channel, head, blobs, descriptors)

    def _hear(self) -> SupervisorMessage:
        assert self._first is not None
        frame = receive_frame(self._first.channel, most_bytes=1 << 28)
        if frame is None:
            if self._first.group is not None and self._first.group.usage().memory_exhausted:
                self._stopped_for = "memory"
                return SupervisorMessage({"ended": -1})
            raise SetupError("the sandbox's first process ended")
        if "failed" in frame.head:
            raise SetupError(str(frame.head["failed"]))
        return frame

    def _stage(self, stage: Stage, stdin: bytes, *, last: bool) -> tuple[dict[str, Any], list[bytes]]:
        assert self._first is not None
        limits, group = self._order.limits, self._first.group
        if group is not None:
            group.limit_memory(stage.memory_mb)
            group.forget_peak()
            group.limit_pids(limits.pids + 1)
        spoken_to = last and self._order.session
        in_reading, in_writing = os.pipe2(os.O_CLOEXEC)
        out_reading, out_writing = os.pipe2(os.O_CLOEXEC)
        error_reading, error_writing = os.pipe2(os.O_CLOEXEC)
        given = [in_reading, out_writing, error_writing]
        if spoken_to:
            given[:2] = self._frame.descriptors[:2]
        if last and self._order.follows_input:
            # It may wait for ever for a source that says nothing, so it is left alone; it ends with this process.
            pump = threading.Thread(target=_pump, args=(self._frame.descriptors[0], in_writing), daemon=True)
            pump.start()
            feed = None
        else:
            feed = Feed(in_writing, stdin)
        keep = limits.output_kb << 10
        output, errors = CappedStream(out_reading, keep), CappedStream(error_reading, keep)
        start = {
            "do": "start",
            "arguments": list(stage.arguments),
            "environment": dict(self._order.environment),
            "address_space_bytes": stage.memory_mb * _MIB if group is None else _ROOMY_ADDRESS_SPACE,
            "cpu_seconds": stage.cpu_seconds,
            # The file system is to be the one that refuses, as it tells afterwards; on the host there is only this.
            "disk_bytes": (limits.disk_mb + (0 if self._confinement.on_host else 1)) * _MIB,
            "open_files": limits.open_files,
            # The group should refuse first, because only it reports that.
            "tasks": limits.pids if group is None else limits.pids + _SPARE_TASKS,
        }
        try:
            began = time.monotonic()
            self._tell(start, descriptors=given)
            for descriptor in (in_reading, out_writing, error_writing):
                os.close(descriptor)
            if spoken_to:
                self._frame.close()
            status = self._watch(stage, feed, output, errors)
            wall_seconds = time.monotonic() - began
            final = {} if status is None else self._finish(last)
            for stream in (output, errors):
                stream.drain(HARD_OUTPUT_BYTES)
        finally:
            for closed in (feed, output, errors):
                if closed is not None:
                    closed.close()
        counted = group.usage() if group is not None else None
        facts = {
            "status": status,
            "stopped_for": self._stopped_for,
            "wall_seconds": wall_seconds,
            "cpu_seconds": final.get("cpu_seconds", 0.0),
            "peak_bytes": counted.peak_bytes
            if counted
            else max(self._peak_bytes, final.get("peak_bytes", 0)),
            "memory_exhausted": counted.memory_exhausted if counted else False,
            "pids_refused": counted.pids_refused if counted else self._pids_reached,
            "disk_full": final.get("disk_full", False),
            "truncated": [output.truncated, errors.truncated],
            "names": final.get("names", []),
        }
        return facts, [bytes(output.kept), bytes(errors.kept), *final.get("contents", [])]

    def _watch(
        self, stage: Stage, feed: Feed | None, output: CappedStream, errors: CappedStream
    ) -> int | None:
        """Move bytes and keep the limits until the program ends; return its wait status, None if it did not end."""
        assert self._first is not None
        channel, deadline = self._first.channel, time.monotonic() + stage.wall_seconds
        killed_at: float | None = None
        next_look = time.monotonic() + _WATCH_SECONDS
        watched = self._first.group is None or self._confinement.on_host
        with selectors.DefaultSelector() as selector:
            selector.register(channel, selectors.EVENT_READ)
            selector.register(self._server, selectors.EVENT_READ)
            for stream in (output, errors):
                selector.register(stream.descriptor, selectors.EVENT_READ, stream)
            if feed is not None:
                selector.register(feed.descriptor, selectors.EVENT_WRITE, feed)
            while True:
                now = time.monotonic()
                if killed_at is None and now >= deadline:
                    self._stop("time")
                if killed_at is None and self._stopped_for is not None:
                    killed_at = now
                if killed_at is not None and now > killed_at + _GRACE_SECONDS:
                    return None
                if watched and now >= next_look:
                    self._look(stage)
                    next_look = time.monotonic() + max(_WATCH_SECONDS, 4 * (time.monotonic() - now))
                wake = deadline if killed_at is None else killed_at + _GRACE_SECONDS
                if watched:
                    wake = min(wake, next_look)
                for key, _ in selector.select(max(0.0, wake - time.monotonic())):
                    if key.fileobj is channel:
                        return self._ended(self._hear())
                    if key.fileobj is self._server:
                        selector.unregister(self._server)
                        self._stop("closed")
                    elif isinstance(key.data, Feed):
                        key.data.write_some()
                        if not key.data.open:
                            selector.unregister(key.fd)
                    elif isinstance(key.data, CappedStream):
                        key.data.read_some()
                        if not key.data.open:
                            selector.unregister(key.fd)
                        elif key.data.total > HARD_OUTPUT_BYTES:
                            self._stop("output")

    @staticmethod
    def _ended(frame: SupervisorMessage) -> int:
        status = frame.head["ended"]
        if not isinstance(status, int):
            raise SetupError("the sandbox's first process does not keep to the protocol")
        return status

    def _stop(self, reason: str) -> None:
        if self._stopped_for is None:
            self._stopped_for = reason
            self._tell({"do": "stop"})

    def _look(self, stage: Stage) -> None:
        """Add up the usage of the processes, if the kernel does not."""
        assert self._first is not None
        limits = self._order.limits
        if self._confinement.on_host and exceeds(
            self._order.directory, (limits.disk_mb + 1) * _MIB, limits.inodes + _OWN_ENTRIES
        ):
            self._stop("disk")
        if self._first.group is not None:
            return
        inside = self._innermost()
        used = tree.usage(inside)
        self._pids_reached = self._pids_reached or used.tasks >= limits.pids
        if used.memory_bytes == 0:
            return
        total = used.memory_bytes + self._files_bytes(inside)
        self._peak_bytes = max(self._peak_bytes, total)
        if total > stage.memory_mb * _MIB:
            self._stop("memory")

    def _innermost(self) -> int:
        """Return our first process, which another program may have started below itself."""
        assert self._first is not None
        below = tree.descendants(self._first.pid) if self._confinement.jail is None else []
        return below[0] if below else self._first.pid

    def _files_bytes(self, inside: int) -> int:
        """The files of the sandbox lie in memory, too, unless they are the host's."""
        if self._confinement.on_host:
            return 0
        try:
            room = os.statvfs(f"/proc/{inside}/root{self._order.directory}")
        except OSError:
            return 0
        return (room.f_blocks - room.f_bfree) * room.f_frsize

    def _finish(self, last: bool) -> dict[str, Any]:
        assert self._first is not None
        collect = list(self._order.collect) if last and self._stopped_for is None else []
        self._tell({"do": "finish", "collect": collect, "most_bytes": self._order.most_collected})
        self._first.channel.settimeout(2 * _GRACE_SECONDS)
        frame = self._hear()
        self._first.channel.settimeout(None)
        return {**frame.head, "contents": list(frame.blobs)}


def _pump(source: int, target: int) -> None:
    """Copy bytes until the source ends, or until the reader has closed the target."""
    with contextlib.suppress(OSError):
        while data := os.read(source, 1 << 16):
            while data:
                data = data[os.write(target, data) :]
    os.close(target)
