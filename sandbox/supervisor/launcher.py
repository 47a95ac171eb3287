"""The process that forks monitors. It is started as `python -I -S -c ...` and takes connections from its server."""

import contextlib
import gc
import os
import signal
import socket
import sys

from rollgym.sandbox.supervisor.cgroups import Parents, find_parents
from rollgym.sandbox.supervisor.confinements import CONFINEMENTS
from rollgym.sandbox.supervisor.frames import FrameError
from rollgym.sandbox.supervisor.monitor import monitor


def main() -> None:
    """Fork a monitor for each descriptor that comes, until the server is gone."""
    server = socket.socket(fileno=int(sys.argv[2]))
    os.chdir("/")
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Monitors need no burial.
    parents = find_parents()
    # Made once, and inherited by every monitor.
    CONFINEMENTS[sys.argv[3]].make_ready()
    gc.collect()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(server, 1, 1)
        if not data:
            break
        if os.fork() == 0:
            _become_monitor(server, descriptors[0], parents)
        for descriptor in descriptors:
            os.close(descriptor)
    # Monitors whose server is gone end their runs; after this no process of the sandbox is left.
    with contextlib.suppress(ChildProcessError):
        os.wait()


def _become_monitor(server: socket.socket, descriptor: int, parents: Parents | None) -> None:
    try:
        server.close()
        gc.disable()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection = socket.socket(fileno=descriptor)
        monitor(connection, parents)
    except (FrameError, OSError):
        pass  # The server is gone, or has sent nonsense: no one is left to notify.
    finally:
        os._exit(0)
