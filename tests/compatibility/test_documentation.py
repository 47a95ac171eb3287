"""The examples of docs/other_protocols.md run as they stand there, with the packages that they are for."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.peer_processes import peer_environment
from tests.support.processes import ROOT
from tests.support.wire import Server

ADDRESS = "http://127.0.0.1:8000"
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "other_protocols.md").read_text(), re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["openenv", "rock"])
def test_the_example(server: Server, peer: str, request: pytest.FixtureRequest) -> None:
    python: Path = request.getfixturevalue(peer)
    (example,) = (each for each in EXAMPLES if f"{peer}" in each.splitlines()[0])
    done = subprocess.run(
        [str(python), "-c", example.replace(ADDRESS, server.url)],
        env=peer_environment() | {"ROCK_BASE_URL": server.url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
