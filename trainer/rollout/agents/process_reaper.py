"""Runs a program, and kills it with all its descendants: when it exits, or when the process that asked for it is gone.

    python -IS trainer/rollout/agents/process_reaper.py FD PROGRAM [ARGUMENT ...]

FD is the reading end of a pipe; the process that holds the writing end lives as long as the program is wanted. If the
trainer is killed, the kernel closes its end, so no agent is left behind. On Linux, descendants that have left their
parents are found, too; elsewhere only the program's process group is killed.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence

_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Run the program and return its exit code; 128 + N if signal N ended it."""
    wanted, command = int(arguments[0]), list(arguments[1:])
    _prctl(_SET_CHILD_SUBREAPER, 1)
    # Woken by the pipe's end, and by the program's.
    ended, note = os.pipe()
    os.set_blocking(note, False)
    signal.set_wakeup_fd(note, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        program = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        return 127
    code = None
    while (code := program.poll()) is None:
        readable, _, _ = select.select([wanted, ended], [], [])
        if wanted in readable:
            break
        os.read(ended, 4096)
    _end(program)
    code = program.returncode if code is None else code
    return 128 - code if code < 0 else code


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end(program: "subprocess.Popen[bytes]") -> None:
    """Kill everything below this process until nothing is left: orphans of the program are our children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, signal.SIGKILL)
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                _, status = os.waitpid(child, 0)
                if child == program.pid:
                    program.returncode = os.waitstatus_to_exitcode(status)
    if program.returncode is None:
        program.wait()


def _children() -> list[int]:
    """Return the children of this process: what has lost its parent has become one of them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(each) for each in file.read().split()]
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
