"""Runs a program for as long as its starter lives: `python -m ...inference.servers.parent_guard PROGRAM ARGUMENT...`.

The guard's standard input is a pipe that its starter holds. It ends when the starter does, however it does, and the
guard then ends the program and all of its processes. Standard library only: it starts in a moment.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_S = 15.0
"""How long a program that was asked to end may take."""

_CANNOT_START = 127
"""A shell's exit code for a program that cannot be found."""
_PARENT_DEATH_SIGNAL = 1
"""Linux's name of it to `prctl`."""


def keep(command: list[str]) -> int:
    """Run a program until it ends, standard input ends, or a signal asks for it; return its exit code."""
    stop_reader, stop_writer = os.pipe()
    os.set_blocking(stop_writer, False)
    signal.set_wakeup_fd(stop_writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    try:
        # A session of its own: whatever processes it starts can be ended together.
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_guard
        )
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}: install it, or give its path\n")
        return _CANNOT_START
    try:
        _wait(program, stop_reader)
    finally:
        _end(program)
    return program.returncode


def _end_with_guard() -> None:
    """Have Linux send SIGTERM to the program if its guard is killed: an orphan would keep its port."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _wait(program: "subprocess.Popen[bytes]", stop: int) -> None:
    """Return when the program has ended, or should."""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(stop, selectors.EVENT_READ)
        while program.poll() is None:
            for key, _ in selector.select():
                said = os.read(int(key.fd), 4096)
                if key.fd == 0 and not said:
                    return
                if key.fd == stop and {signal.SIGTERM, signal.SIGINT} & set(said):
                    return


def _end(program: "subprocess.Popen[bytes]") -> None:
    """End the program, in order if it does so in time, and then whatever it left behind."""
    if program.poll() is None:
        _signal(program.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            program.wait(GRACE_S)
    _signal(program.pid, signal.SIGKILL)
    program.wait()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    code = keep(sys.argv[1:])
    # A shell's way to say which signal ended a program.
    sys.exit(code if code >= 0 else 128 - code)
