"""What a process keeps for itself when it connects to Ray: its breakpoints and its signals."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def own_breakpoints() -> Iterator[None]:
    """Keep what `breakpoint()` does in this process; Ray would have it call a debugger of its own, away from here."""
    before = os.environ.get("PYTHONBREAKPOINT")
    try:
        yield
    finally:
        os.environ.pop("PYTHONBREAKPOINT", None)
        if before is not None:
            os.environ["PYTHONBREAKPOINT"] = before


def take_back_signals() -> None:
    """Take signals that end a process in good order back from Ray, which writes stacks at them."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
