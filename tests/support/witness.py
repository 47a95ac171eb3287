"""Somebody who steps while others flood a server, and says how long it was kept waiting.

Runs in a process of its own, so that it is not kept waiting by those who flood: `python -m tests.support.witness PORT
TOKEN PID...`, until its input ends. It prints a line when it begins, and a line of JSON in the end.
"""

import http.client
import json
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Self

from tests.support.patience import Queued

_PAUSE_S = 0.005
_STALL_S = 0.05
_PATIENCE_S = 60.0
# A server that has too much to do says so, which is an answer.
_LATER = (429, 503)


@dataclass
class Waited:
    """How long steps took, less the time in which server or witness stood in line for a processor.

    Attributes:
        steps: How many there were.
        longest_s: The longest one.
        stalls: How many took more than 50 ms.
    """

    steps: int = 0
    longest_s: float = 0.0
    stalls: int = 0

    def took(self, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.longest_s = max(self.longest_s, seconds)
        self.stalls += seconds > _STALL_S

    def __add__(self, other: "Waited") -> "Waited":
        return Waited(
            self.steps + other.steps, max(self.longest_s, other.longest_s), self.stalls + other.stalls
        )


class Witness:
    """A witness in a process of its own, for the time of a block.

    Args:
        port: Where the server is.
        token: Its token.
        pids: The server's processes.
    """

    def __init__(self, port: int, token: str, pids: list[int]) -> None:
        self._command = [sys.executable, "-m", __name__, str(port), token, *map(str, pids)]
        self.waited = Waited()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        # Otherwise all could be over before it has begun.
        self._process.stdout.readline()
        return self

    def __exit__(self, *_: object) -> None:
        output, _errors = self._process.communicate(timeout=_PATIENCE_S)
        if self._process.returncode == 0:
            self.waited = Waited(**json.loads(output))


def _ask(connection: http.client.HTTPConnection, token: str, path: str, body: object) -> dict[str, object]:
    connection.request(
        "POST",
        path,
        json.dumps(body),
        {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
    )
    answer = connection.getresponse()
    content = answer.read()
    if answer.status >= 400 and answer.status not in _LATER:
        raise SystemExit(f"{path} is answered {answer.status}: {content.decode()[:500]}")
    found: dict[str, object] = json.loads(content)
    return found


def watch(port: int, token: str, pids: list[int]) -> Waited:
    """Step until the input ends."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    body = {"env_id": "Inline", "reset": {"seed": 1}, "kwargs": {"length": 10**6}, "idle_timeout_s": 20}
    while "session_id" not in (session := _ask(connection, token, "/v1/sessions", body)):
        # The server is still behind with what came before.
        time.sleep(_PAUSE_S)
    path = f"/v1/sessions/{session['session_id']}"
    waited = Waited()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        queued, began = Queued(pids), time.perf_counter()
        _ask(connection, token, f"{path}/step", {"action": "go"})
        waited.took(time.perf_counter() - began - queued.seconds)
    connection.request("DELETE", path, headers={"Authorization": f"Bearer {token}"})
    connection.getresponse().read()
    return waited


if __name__ == "__main__":
    print(json.dumps(asdict(watch(int(sys.argv[1]), sys.argv[2], [int(pid) for pid in sys.argv[3:]]))))
