"""Runs programs, one after another, for as long as the host is there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys

from rollgym.sandbox.containers.inside.files import shown, wipe
from rollgym.sandbox.containers.inside.frames import READY, RUN, Host, frame
from rollgym.sandbox.containers.inside.run import ContainerRun, close_memory

_TOOLS = {"python": ("python3",), "bash": ("bash",), "cxx": ("g++", "clang++")}


def _find(names: tuple[str, ...]) -> str | None:
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def main() -> None:
    """Serve the host until it is gone."""
    if os.getpid() != 1:
        # It kills all processes that it can see.
        sys.exit("this is for the first process of a container only")
    close_memory(True)
    os.umask(0o022)
    wakeup, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host = Host()
    tools = {name: _find(names) for name, names in _TOOLS.items()}
    kept = shown()
    while True:
        clean = wipe(kept)
        host.send(frame(READY, json.dumps({"clean": clean, "tools": tools}).encode()))
        kind, payload = host.frame()
        while kind != RUN:
            # Messages for a session that had ended by itself.
            kind, payload = host.frame()
        ContainerRun(json.loads(payload), host).carry_out(wakeup)
