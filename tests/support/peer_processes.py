"""Scripts that run with a peer's packages: its clients, which end by themselves, and its servers, which do not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.support.peer_packages import SCRIPTS


def play(python: Path, script: str, *arguments: str, **environment: str) -> Any:
    """Run a client to its end; gives what it wrote, as JSON, in its last line."""
    done = subprocess.run(
        [str(python), str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
        env=peer_environment() | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class PeerServer:
    """A server of a peer's on a free port; its script takes the port as its last argument."""

    def __init__(self, python: Path, script: str, *arguments: str, **environment: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [str(python), str(SCRIPTS / script), *arguments, str(self.port)]
        self._environment = peer_environment() | environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> PeerServer:
        self._process = subprocess.Popen(self._command, env=self._environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.kill()
                    raise
                time.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def __enter__(self) -> PeerServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def peer_environment() -> dict[str, str]:
    """Ours without what leads to our own packages: theirs must be theirs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
