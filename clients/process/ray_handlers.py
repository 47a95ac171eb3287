"""Keeps a process's own breakpoints and signal handlers when it connects to Ray, and shortens Ray's messages."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

_LONGEST_REASON = 300


@contextlib.contextmanager
def own_breakpoints() -> Iterator[None]:
    """Keep the debugger of `breakpoint()` in this process; Ray would replace it by a remote one."""
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


def gist(error: BaseException) -> str:
    """The first and the last line of Ray's message: between them are often stacks of other processes."""
    # The reason that it guesses is the same each time.
    text = str(error).partition("Some common causes include")[0].partition("There are some potential root")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else f"{lines[0]} ({lines[-1][:_LONGEST_REASON]})"
