"""Keeps a shell: commands come in, their output goes out, and what they leave behind is looked at from here.

Where a command ends, its shell says on a socket of its own, so that no output can look like an end. A socket, unlike
a pipe, cannot be reopened below /proc, and what a command writes there itself cannot end the next one, as no command
knows the ticket of another.
"""

import contextlib
import hashlib
import json
import os
import re
import resource
import secrets
import select
import signal
import socket
import stat
import subprocess
import time
from typing import Any

_CHUNK = 1 << 16
# The names are ours, so that a command may call its own variables as it likes.
_LOOP = (
    'while IFS= read -r -d "" -u {channel} _turn_ticket && IFS= read -r -d "" -u {channel} _turn_command; do '
    'eval "$_turn_command" </dev/null {channel}<&-; printf "\\n%s %d\\n" "$_turn_ticket" "$?" >&{channel}; done'
)
_MOST_FILES = 2000


class Shell:
    """One bash. It keeps variables, functions and its directory from command to command."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._output, writing = os.pipe()
        self.process = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile", "-c", _LOOP.format(channel=theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
        theirs.close()
        os.close(writing)
        os.set_blocking(self._output, False)

    def run(self, command: str, seconds: float, most: int) -> dict[str, Any]:
        """Run a command; return its output and its exit code, or how the shell came to its end."""
        ticket = secrets.token_hex(8).encode()
        asked = command.encode(errors="replace").replace(b"\0", b"")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.sendall(b"%s\0%s\0" % (ticket, asked))
        deadline = time.monotonic() + seconds
        output, said = _Output(most), b""
        end = re.compile(rb"^%s (\d+)$" % ticket, re.MULTILINE)
        watched = select.poll()
        watched.register(self._channel, select.POLLIN)
        watched.register(self._output, select.POLLIN)
        status, code = "late", None
        while status == "late" and (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in watched.poll(left * 1000):
                if descriptor == self._output:
                    if not output.take(self._output):
                        watched.unregister(self._output)
                    continue
                part = _read(descriptor)
                # What is not yet a whole line may still become one, if it is short.
                said = said.rpartition(b"\n")[2][-32:] + (part or b"")
                if found := end.search(said[: said.rfind(b"\n") + 1]):
                    status, code = "done", int(found[1])
                elif part == b"":
                    status = "ended"
        # What the command has written before its end may still be in the pipe.
        while select.select([self._output], [], [], 0)[0] and output.take(self._output):
            pass
        return {"status": status, "exit": code, "output": output.text(), "left_out": output.left_out}

    def end(self) -> None:
        """Kill it and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self._channel.close()
        os.close(self._output)


class _Output:
    """The beginning of what is written, and how much more there was."""

    def __init__(self, most: int) -> None:
        self.left_out = 0
        self._most = most
        self._kept = bytearray()

    def take(self, descriptor: int) -> bool:
        """Read what is there; tell whether there may be more."""
        part = _read(descriptor)
        kept = (part or b"")[: max(0, self._most - len(self._kept))]
        self._kept += kept
        self.left_out += len(part or b"") - len(kept)
        return part != b""

    def text(self) -> str:
        return self._kept.decode(errors="replace")


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
