"""Clients with their own servers: what a step costs the process that uses the client."""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import processes
from contenders import OWN_SERVER, peer_server

_HERE = Path(__file__).parent


class ClientCase(NamedTuple):
    """One way of using a client.

    Attributes:
        label: How tables call it.
        script: What runs the client.
        way: The script's `--way`.
        sessions: How many it plays.
        server: Arguments of the interpreter that start the server.
        peer: The peer whose virtual environment both need, if any.
    """

    label: str
    script: Path
    way: str
    sessions: int
    server: tuple[str, ...]
    peer: str | None = None


_OWN, _OPENENV = _HERE / "own_client.py", _HERE / "other_servers" / "openenv_client.py"
CLIENT_CASES = (
    ClientCase("rollgym EnvClient", _OWN, "async", 1, OWN_SERVER),
    ClientCase("OpenEnv client", _OPENENV, "async", 1, peer_server("openenv"), "openenv"),
    ClientCase("rollgym RemoteEnv", _OWN, "sync", 1, OWN_SERVER),
    ClientCase("OpenEnv client, sync", _OPENENV, "sync", 1, peer_server("openenv"), "openenv"),
    ClientCase("rollgym EnvClient", _OWN, "async", 64, OWN_SERVER),
    ClientCase("OpenEnv client", _OPENENV, "async", 64, peer_server("openenv"), "openenv"),
    ClientCase("rollgym RemoteVectorEnv", _OWN, "batch", 64, OWN_SERVER),
)


def measure_client(case: ClientCase, pythons: dict[str, str], seconds: float) -> dict[str, float]:
    """Run a client in a process of its own, on the core of the load."""
    python = sys.executable if case.peer is None else pythons[case.peer]
    with processes.server((python, *case.server)) as server:
        command = [python, str(case.script), f"http://127.0.0.1:{server.port}", "--way", case.way]
        command += ["--sessions", str(case.sessions), "--seconds", str(seconds)]
        found: dict[str, float] = json.loads(subprocess.check_output(command, env=processes.environment()))
    return found
