"""Keeps a shell: commands come in, their output goes out, and what they leave behind is looked at from here.

Where a command ends, its shell says on a descriptor of its own, so that no output can look like an end.
"""

import contextlib
import hashlib
import json
import os
import resource
import select
import signal
import stat
import subprocess
import time
from typing import Any

_CHUNK = 1 << 16
_LOOP = (
    'while IFS= read -r -d "" -u {commands} command; do '
    'eval "$command" </dev/null {commands}<&- {ends}>&-; printf "%d\\n" "$?" >&{ends}; done'
)
_MOST_FILES = 2000


class Shell:
    """One bash. It keeps variables, functions and its directory from command to command."""

    def __init__(self) -> None:
        commands, self._commands = os.pipe()
        self._ends, ending = os.pipe()
        self._output, writing = os.pipe()

        self.process = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile", "-c", _LOOP.format(commands=commands, ends=ending)],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.STDOUT,
            pass_fds=(commands, ending),
            start_new_session=True,
        )
        for descriptor in (commands, ending, writing):
            os.close(descriptor)
        for descriptor in (self._ends, self._output):
            os.set_blocking(descriptor, False)

    def run(self, command: str, seconds: float, most: int) -> dict[str, Any]:
        """Run a command; return its output and its exit code, or how the shell came to its end."""
        os.write(self._commands, command.encode(errors="replace").replace(b"\0", b"") + b"\0")
        deadline = time.monotonic() + seconds
        output, left_out, end = bytearray(), 0, b""
        watched = select.poll()
        for descriptor in (self._ends, self._output):
            watched.register(descriptor, select.POLLIN)
        status = "late"
        while (left := deadline - time.monotonic()) > 0:
            ready = watched.poll(left * 1000)
            for descriptor, _ in ready:
                if descriptor == self._output:
                    part = _read(descriptor)
                    if part == b"":
                        watched.unregister(descriptor)
                    kept = (part or b"")[: max(0, most - len(output))]
                    output += kept
                    left_out += len(part or b"") - len(kept)
                else:
                    part = _read(descriptor)
                    if part == b"":
                        status = "ended"
                    end += part or b""
            if b"\n" in end:
                status = "done"
            if status != "late":
                break
        # What the command has written before its end may still be in the pipe.
        while watched.poll(0) and (part := _read(self._output)):
            kept = part[: max(0, most - len(output))]
            output += kept
            left_out += len(part) - len(kept)
        code = (
            int(end.split(b"\n")[0] or b"0") if status == "done" and end.split(b"\n")[0].isdigit() else None
        )
        return {
            "status": status,
            "exit": code,
            "output": output.decode(errors="replace"),
            "left_out": left_out,
        }

    def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        for descriptor in (self._commands, self._ends, self._output):
            os.close(descriptor)


def main() -> None:
    """Serve on the standard streams."""
    source, channel = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    shell = Shell()
    with open(source, "rb") as requests:
        for line in requests:
            request = json.loads(line)
            if "command" in request:
                answer = shell.run(request["command"], request["seconds"], request["characters"])
                if answer["status"] != "done":
                    shell.end()
                    shell = Shell()
            else:
                answer = {"files": _files(request["snapshot"])}
            data = json.dumps(answer).encode() + b"\n"
            while data:
                data = data[os.write(channel, data) :]


def _files(top: str) -> dict[str, list[Any]]:
    """Return the plain files below a directory: a digest of the content, and whether it may be executed."""
    found: dict[str, list[Any]] = {}
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                mode = os.lstat(path).st_mode
                if not stat.S_ISREG(mode):
                    found[path] = ["no plain file", False]
                    continue
                with open(path, "rb") as file:
                    digest = hashlib.sha256(file.read()).hexdigest()
                found[path] = [digest, bool(mode & stat.S_IXUSR)]
            if len(found) >= _MOST_FILES:
                return found
    return found


def _read(descriptor: int) -> bytes | None:
    """Return what is there, nothing at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
