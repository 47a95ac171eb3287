"""The sandbox's first process: it starts the stages, reaps their remaining processes, and brings files back.

It holds no secret and obeys the monitor; if the monitor disappears, it ends, and all of the sandbox with it.
"""

import contextlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from rollgym.sandbox.supervisor import files
from rollgym.sandbox.supervisor.frames import FrameError, SupervisorMessage, receive_frame, send_frame
from rollgym.sandbox.supervisor.jails import InnerJail, Jail
from rollgym.sandbox.supervisor.restrictions import apply_limits, resource_limits, spawn

_REAP_SECONDS = 2.0


def serve(channel: socket.socket, jail: Jail) -> None:
    """Obey the monitor until it closes the channel."""
    init = _Init(channel, jail)
    try:
        jail.enter()
        init.loop()
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            send_frame(channel, {"failed": f"{error}"})
    finally:
        jail.kill_all()
        jail.leave()


class _Init:
    def __init__(self, channel: socket.socket, jail: Jail) -> None:
        self._channel, self._jail = channel, jail
        self._program: int | None = None
        self._cpu_seconds, self._peak_kib = 0.0, 0
        self._woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def loop(self) -> None:
        """Answer the monitor and reap children, whichever comes first."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._channel:
                        frame = receive_frame(self._channel)
                        if frame is None:
                            return
                        self._obey(frame)
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._woken, 512)
                        self._reap()

    def _obey(self, frame: SupervisorMessage) -> None:
        head = frame.head
        try:
            if head["do"] == "lay":
                for name, content in zip(head["names"], frame.blobs, strict=True):
                    files.lay(self._jail.directory, name, content, self._jail.owner)
            elif head["do"] == "start":
                self._start(head, frame)
            elif head["do"] == "stop":
                self._jail.kill_all()
            elif head["do"] == "finish":
                self._finish(head)
        except (OSError, ValueError) as error:
            send_frame(self._channel, {"failed": f"{error}"})
        finally:
            frame.close()

    def _start(self, head: Mapping[str, Any], frame: SupervisorMessage) -> None:
        limits = resource_limits(
            memory_bytes=head["address_space_bytes"],
            cpu_seconds=head["cpu_seconds"],
            disk_bytes=head["disk_bytes"],
            open_files=head["open_files"],
            tasks=None if head["tasks"] is None else self._jail.task_limit(head["tasks"]),
        )

        def confine() -> None:
            self._jail.confine()
            apply_limits(limits)

        # Until the program runs, a child that ends is one that could not be started, and `spawn` waits for it itself.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        self._cpu_seconds, self._peak_kib = 0.0, 0
        try:
            self._program = spawn(
                head["arguments"], head["environment"], self._jail.directory, frame.descriptors, confine
            )
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])

    def _reap(self) -> bool:
        """Reap the children that have ended; return False when no child is left."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._cpu_seconds += used.ru_utime + used.ru_stime
            self._peak_kib = max(self._peak_kib, used.ru_maxrss)
            if pid == self._program:
                self._program = None
                with contextlib.suppress(OSError):
                    send_frame(self._channel, {"ended": status})
                self._jail.kill_all()

    def _finish(self, head: Mapping[str, Any]) -> None:
        self._jail.kill_all()
        deadline = time.monotonic() + _REAP_SECONDS
        while self._reap() and (left := deadline - time.monotonic()) > 0:
            select.select([self._woken], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 512)
        self._program = None
        room = os.statvfs(self._jail.directory)
        found = files.collect(self._jail.directory, head["collect"], head["most_bytes"])
        answer = {
            "cpu_seconds": self._cpu_seconds,
            "peak_bytes": self._peak_kib << 10,
            "disk_full": room.f_bavail == 0 or room.f_favail == 0,
            "names": list(found),
        }
        send_frame(self._channel, answer, list(found.values()))


def run_init(channel: socket.socket, jail: Jail) -> None:
    """Serve as the first process, and end it."""
    code = 1
    try:
        serve(channel, jail)
        code = 0
    except (FrameError, OSError):
        pass
    finally:
        os._exit(code)


def main() -> None:
    """Serve the monitor until it disconnects."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    run_init(channel, InnerJail())
