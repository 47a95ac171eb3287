"""An I/O process as its supervisor starts it: told what to be on standard input, and ended when that is closed."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from env_server.common.io_process import ProcessRank
from env_server.common.settings import ConfigurationError, Settings
from env_server.process.listening import bind
from env_server.process.server import run_process

READY_LINE = b"ready\n"
"""What the process writes to its standard output once it serves."""


def main() -> int:
    """Serve until the supervisor says so, or is no more; gives the exit code."""
    # Until the token file is read, there is nothing to read again.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    orders = json.loads(sys.stdin.buffer.readline())
    settings = Settings.model_validate(orders["settings"])
    rank = ProcessRank(orders["index"], settings.processes, Path(orders["directory"]), orders["restarts"])
    # Standard output is the way to the supervisor; what anybody else prints goes to the log.
    supervisor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_end_with_supervisor, name="supervisor", daemon=True).start()
    try:
        listening = bind(settings.host, settings.port, shared=True)
        return run_process(settings, rank, listening, lambda: _tell(supervisor))
    except ConfigurationError as error:
        sys.stderr.write(f"roll-serve: {error}\n")
        return 2


def _tell(supervisor: int) -> None:
    os.write(supervisor, READY_LINE)
    os.close(supervisor)


def _end_with_supervisor() -> None:
    """Drain when the other end of standard input is closed, which nothing but the supervisor's end does."""
    # Not through `sys.stdin`: its lock, held here for ever, would be in the way when the interpreter ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
